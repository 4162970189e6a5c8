// Python bindings over raw pointers and sizes: one binary serves every version of torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "dims.h"
#include "megakernel.h"

namespace py = pybind11;

namespace {
template <class D> std::vector<int> shape_of() {
  return {D::LAYERS,       D::HIDDEN,             D::HEADS, D::KV_HEADS, D::EXPERTS,   D::TOP_K,
          D::INTERMEDIATE, D::DENSE_INTERMEDIATE, D::VOCAB, D::WINDOW,   D::FULL_EVERY};
}

void check_dims(const std::string& name, const std::vector<int>& shape) {
  const bool known = name == NorthMiniCode::NAME || name == Small::NAME;
  if (!known || shape != (name == Small::NAME ? shape_of<Small>() : shape_of<NorthMiniCode>()))
    throw std::invalid_argument("the kernel is not compiled for the model '" + name + "' in this shape; add it to native/dims.h and build again");
}

long long number(const char* name, long long v, long long low, long long high) {
  if (v < low || v > high)
    throw std::invalid_argument(std::string(name) + " = " + std::to_string(v) + " is not in " + std::to_string(low) + ".." + std::to_string(high));
  return v;
}

std::uintptr_t pointer(const char* name, std::uintptr_t p, int alignment, bool optional = false) {
  if ((!p && !optional) || p % alignment)
    throw std::invalid_argument(std::string(name) + " must be a device pointer aligned to " + std::to_string(alignment) + " bytes");
  return p;
}

// What stays the same from step to step.
class Launcher {
 public:
  Launcher(std::string model, const py::dict& pointers, const py::dict& numbers) : model_(std::move(model)) {
    auto p = [&](const char* name, int alignment) { return pointer(name, pointers[name].cast<std::uintptr_t>(), alignment); };
    auto n = [&](const char* name, long long low, long long high) { return number(name, numbers[name].cast<long long>(), low, high); };
    a_.layers = (const LayerPointers*)p("layers", 16);
    a_.norms = (const void*)p("norms", 16), a_.rope = (const void*)p("rope", 16);
    a_.kv_full = (char*)p("kv_full", 128), a_.kv_sliding = (char*)p("kv_sliding", 128);
    a_.table_full = (const int*)p("table_full", 4), a_.table_sliding = (const int*)p("table_sliding", 4);
    a_.tasks = (const int*)p("tasks", 16);
    a_.sums = (unsigned long long*)p("sums", 16), a_.qkv = (uint32_t*)p("qkv", 16);
    a_.partials = (uint32_t*)p("partials", 16), a_.softmax = (uint32_t*)p("softmax", 8);
    a_.counters = (unsigned*)p("counters", 128);
    a_.best = (int*)p("best", 8), a_.out = (int*)p("out", 8), a_.routing = (int*)p("routing", 4);
    a_.mailbox = (unsigned long long*)p("mailbox", 8);
    a_.pages_full = n("pages_full", 1, 1 << 24), a_.pages_sliding = n("pages_sliding", 1, 1 << 24);
    a_.in_flight = (int)n("in_flight", 1, SLOTS), a_.early_pages = (int)n("early_pages", 0, SLOTS - 2);
    a_.num_sms = (int)n("num_sms", 1, MAX_SMS);
  }

  void step(int token, int position, unsigned epoch, float inverse_temperature, unsigned long long seed, long long timeout_ns,
            std::uintptr_t logits, std::uintptr_t forced, std::uintptr_t hidden, std::uintptr_t ticks, int stall_sm, std::uintptr_t stream) {
    StepArgs a = a_;
    a.token = (int)number("token", token, -1, 1 << 30), a.position = (int)number("position", position, 0, 1 << 30);
    a.timeout_ns = number("timeout_ns", timeout_ns, 1, 1ll << 40);
    a.epoch = epoch, a.inverse_temperature = inverse_temperature, a.seed = seed, a.stall_sm = stall_sm;
    a.logits = (float*)pointer("logits", logits, 4, true), a.forced = (const int*)pointer("forced", forced, 4, true);
    a.hidden = (float*)pointer("hidden", hidden, 4, true), a.ticks = (long long*)pointer("ticks", ticks, 8, true);
    const char* error;
    {
      py::gil_scoped_release release;
      error = launch_step(model_.c_str(), a, (void*)stream);
    }
    if (error) throw std::runtime_error(std::string("the decode kernel did not start: ") + error);
  }

  long long wait(unsigned epoch, std::uintptr_t stream) const {
    py::gil_scoped_release release;
    return wait_step(a_.mailbox, epoch, (void*)stream);
  }

 private:
  std::string model_;
  StepArgs a_{};
};
}  // namespace

PYBIND11_MODULE(_megakernel, m) {
  m.doc() = "The decode megakernel; northchat.engine.megakernel checks and calls it.";
  m.def("check_dims", &check_dims, py::arg("name"), py::arg("shape"), "Raises ValueError unless the kernel is compiled for this shape.");
  py::class_<Launcher>(m, "Launcher", "A model's buffers. Raises ValueError on a pointer or a number that cannot be.")
      .def(py::init<std::string, const py::dict&, const py::dict&>(), py::arg("model"), py::arg("pointers"), py::arg("numbers"))
      .def("step", &Launcher::step, py::arg("token"), py::arg("position"), py::arg("epoch"), py::arg("inverse_temperature"), py::arg("seed"),
           py::arg("timeout_ns"), py::arg("logits"), py::arg("forced"), py::arg("hidden"), py::arg("ticks"), py::arg("stall_sm"), py::arg("stream"),
           "Queues one step on a stream. Raises ValueError on a bad argument, RuntimeError where the launch fails.")
      .def("wait", &Launcher::wait, py::arg("epoch"), py::arg("stream"), "The token of the newest step, or -1 if it left none.");
}
