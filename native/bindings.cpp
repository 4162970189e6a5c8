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

void step(const std::string& model, const py::dict& pointers, const py::dict& numbers, float inverse_temperature, std::uintptr_t stream) {
  StepArgs a{};
  auto pointer = [&](const char* name, int alignment, bool optional = false) {
    const auto p = pointers[name].cast<std::uintptr_t>();
    if ((!p && !optional) || p % alignment)
      throw std::invalid_argument(std::string(name) + " must be a device pointer aligned to " + std::to_string(alignment) + " bytes");
    return p;
  };
  auto number = [&](const char* name, long long low, long long high) {
    const auto v = numbers[name].cast<long long>();
    if (v < low || v > high)
      throw std::invalid_argument(std::string(name) + " = " + std::to_string(v) + " is not in " + std::to_string(low) + ".." + std::to_string(high));
    return v;
  };
  a.layers = (const LayerPointers*)pointer("layers", 16);
  a.norms = (const void*)pointer("norms", 16), a.rope = (const void*)pointer("rope", 16);
  a.kv_full = (char*)pointer("kv_full", 128), a.kv_sliding = (char*)pointer("kv_sliding", 128);
  a.table_full = (const int*)pointer("table_full", 4), a.table_sliding = (const int*)pointer("table_sliding", 4);
  a.tasks = (const int*)pointer("tasks", 16);
  a.sums = (unsigned long long*)pointer("sums", 16), a.qkv = (uint32_t*)pointer("qkv", 16);
  a.partials = (uint32_t*)pointer("partials", 16), a.softmax = (uint32_t*)pointer("softmax", 8);
  a.counters = (unsigned*)pointer("counters", 128);
  a.best = (int*)pointer("best", 8), a.out = (int*)pointer("out", 8), a.routing = (int*)pointer("routing", 4);
  a.logits = (float*)pointer("logits", 4, true), a.forced = (const int*)pointer("forced", 4, true);
  a.hidden = (float*)pointer("hidden", 4, true), a.ticks = (long long*)pointer("ticks", 8, true);
  a.pages_full = number("pages_full", 1, 1 << 24), a.pages_sliding = number("pages_sliding", 1, 1 << 24);
  a.timeout_ns = number("timeout_ns", 1, 1ll << 40);
  a.seed = numbers["seed"].cast<unsigned long long>();
  a.epoch = (unsigned)number("epoch", 0, 0xffffffffll);
  a.token = (int)number("token", -1, (1 << 30));
  a.position = (int)number("position", 0, (1 << 30));
  a.in_flight = (int)number("in_flight", 1, SLOTS);
  a.early_pages = (int)number("early_pages", 0, SLOTS - 2);
  a.num_sms = (int)number("num_sms", 1, MAX_SMS);
  a.stall_sm = (int)number("stall_sm", -1, 1024);
  a.inverse_temperature = inverse_temperature;
  const char* error;
  {
    py::gil_scoped_release release;
    error = launch_step(model.c_str(), a, (void*)stream);
  }
  if (error) throw std::runtime_error(std::string("the decode kernel did not start: ") + error);
}
}  // namespace

PYBIND11_MODULE(_megakernel, m) {
  m.doc() = "The decode megakernel; northchat.engine.megakernel checks and calls it.";
  m.def("check_dims", &check_dims, py::arg("name"), py::arg("shape"), "Raises ValueError unless the kernel is compiled for this shape.");
  m.def("step", &step, py::arg("model"), py::arg("pointers"), py::arg("numbers"), py::arg("inverse_temperature"), py::arg("stream"),
        "Queues one step on a stream. Raises ValueError on a bad argument, RuntimeError where the launch fails.");
}
