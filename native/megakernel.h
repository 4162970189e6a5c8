// What a launch needs; all pointers are device pointers. northchat/engine/megakernel.py says shapes and types.
#pragma once
#include <cstdint>

struct LayerPointers {
  const char *qkv, *experts, *oproj;
  const void* unused;
};

struct StepArgs {
  const LayerPointers* layers;  // one per layer, then the head's
  const void *norms, *rope;
  char *kv_full, *kv_sliding;
  const int *table_full, *table_sliding;
  const int* tasks;
  unsigned long long* sums;
  uint32_t *qkv, *partials, *softmax;
  unsigned* counters;
  int *best, *out, *routing;
  unsigned long long* mailbox;  // pinned host memory: epoch + 1 and the token, once a step is done
  float* logits;       // or null
  const int* forced;   // or null
  float* hidden;       // or null
  long long* ticks;    // or null
  long long pages_full, pages_sliding, timeout_ns;
  unsigned long long seed;
  unsigned epoch;
  int token, position, in_flight, early_pages, num_sms, stall_sm;
  float inverse_temperature;  // 0: greedy
};

// Returns null, or what went wrong.
const char* launch_step(const char* model, const StepArgs& args, void* stream);

// Waits for the step of that epoch, the newest on the stream; its token, or -1 if the stream ran dry without one.
long long wait_step(const volatile unsigned long long* mailbox, unsigned epoch, void* stream);
