// One decode step of one sequence in one persistent kernel: docs/megakernel.md explains the design.
//
// One block an SM. The producer warp streams weights and KV pages into a ring of slots; eight consumer warps
// multiply; the helper warp carries results between SMs. All three walk the same task list. An SM waits for others three times
// a layer: for the residual (H1), for its KV head's query, key and value (H2a), for the attention of its output channels (H3a).
#include "megakernel.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstring>

#include "device.cuh"
#include "dims.h"

namespace {
// Registers move from the third warpgroup (producer, helper, router, watchdog) to the consumers.
constexpr int CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 128, CONSUMER_REGISTERS = 184, OTHER_REGISTERS = 136;
constexpr int HELD = 1;  // row chunks that consumers hold in registers while they wait for the residual; every program begins with as many
constexpr int MAX_QKV_CHANNELS = 128, MAX_OPROJ_UNITS = 32;  // schedule.py checks these
enum Phase { PH_WEIGHTS = 1, PH_SLOT, PH_H1, PH_H2A, PH_H3A, PH_ACTIVATIONS, PH_RESULTS, PH_TOKEN, PH_DRAIN };
enum Counter { C_RESIDUAL, C_TOKEN, C_QKV, C_ATTENTION = 16 };  // a line of 128 bytes each
constexpr float LOG2E = 1.4426950408889634f;

struct alignas(16) Task {
  int op, first, count, unused;
};

template <class D> struct Shared {
  uint64_t full[SLOTS], empty[SLOTS], rows_full[2], rows_empty[2], q_full, o_full, attended, routed, hinted, finished;
  // The normed hidden vector in the order in which a warp's tensor-core steps take it: 16 lanes x 8 bytes a step, padded.
  uint32_t x[WARPS * Layout<D>::STEPS * 36];
  alignas(16) float rows[2][GROUP * WARPS * UNIT];  // parts of finished rows by unit, warp, row; handed to the helper
  float gated[2][2 * WARPS * UNIT];       // the same of one expert unit: gate rows, up rows
  uint4 query[2][GROUP * HEAD_DIM / 8];   // scaled queries of this SM's KV head: bf16, and what rounding left over
  uint4 newest[2][HEAD_DIM / 8];          // key and value of this step's token
  float channels[MAX_OPROJ_UNITS * UNIT]; // attention's output channels that this SM projects
  float weights[2][Layout<D>::MAX_SPLITS]; // of the splits in the attention of up to two heads
  float raw[MAX_QKV_CHANNELS];            // residual at the channels of this SM's router pieces
  float maxima[WARPS * GROUP], totals[WARPS * GROUP], squares[WARPS];
  float logits[D::EXPERTS];               // of the router, before the norm's scale
  int experts[8];                         // the best, by rank
  uint32_t rope[HEAD_DIM / 2];            // cosine and sine at this position
  Task tasks[KINDS * MAX_TASKS];
  float scale;                            // 1 / root mean square of the residual
  int pages[2][32];                       // physical pages that this SM reads, full and sliding layers
  uint8_t order[32];                      // slots in the order of consumption, the producer's own notes
  int meeting;                            // slot where the warps' parts of the attention meet
  int gone[2];                            // [0] set: nothing waits any more; [1] who noticed first
};

template <bool PROBED> struct Block {
  const StepArgs& A;
  int* gone;
  int sm, layer;

  __device__ __forceinline__ void tick(int layers, int event, long long value) const {
    if (PROBED && A.ticks) A.ticks[((size_t)sm * (layers + 1) + layer) * 24 + event] = value;
  }
  // Every wait of the kernel. When the watchdog's patience ends, or another block's, all waits end at once and the step runs to its end on
  // whatever is there; the first to notice leaves layer and phase. Small, as every copy of it is code that must stay cached.
  template <class F> __device__ __forceinline__ void wait(F ready, int phase) const {
    while (!ready())
      if (*(volatile int*)gone) {
        atomicCAS(gone + 1, 0, 1 << 30 | layer << 8 | phase);
        return;
      }
  }
  __device__ __forceinline__ void wait_bar(uint64_t* bar, unsigned parity, int phase) const {
    wait([&] { return ptx::passed(bar, parity & 1); }, phase);
  }
  __device__ __forceinline__ unsigned* counter(int c) const { return A.counters + c * 32; }
  // Counters only grow; the difference, not the value, is compared, so that they may wrap.
  // They order nothing: they only say that the words counted are about to arrive, and so are worth looking at. One thread an SM polls
  // four bytes in place of the words themselves, whose lines would otherwise be asked for by everybody all the time.
  __device__ __forceinline__ void wait_hint(int c, unsigned goal, int phase, int sleep) const {
    wait([&] {
      if ((int)(ptx::relaxed(counter(c)) - goal) >= 0) return true;
      if (sleep) __nanosleep(sleep);
      return false;
    }, phase);
  }
};

// Which pages of a KV head one SM reads, and whether it also takes the newest token.
template <class D> struct Share {
  int low, first, pages, mine;
  bool newest;
  __device__ __forceinline__ Share(const StepArgs& A, int layer, int split) {
    const int splits = A.num_sms / D::KV_HEADS;
    low = Layout<D>::full(layer) ? 0 : max(0, A.position - D::WINDOW + 1);
    first = low / PAGE;
    pages = A.position ? (A.position - 1) / PAGE - first + 1 : 0;
    mine = split >= 0 && split < pages ? (pages - split + splits - 1) / splits : 0;
    newest = split >= 0 && split == pages % splits;
  }
};

// Vectors that one SM writes and others read carry the number of their layer in the two lowest bits of each float, so that a reader
// sees in the word itself that it is new: neither fence nor counter. Every word is written once in every layer, and no SM is in
// layer n+1 before all have done with layer n's (H1), so what else can be there is the layer before.
__device__ __forceinline__ uint32_t tagged(float v, unsigned n) { return __float_as_uint(v) & ~3u | n & 3; }
__device__ __forceinline__ float untagged(uint32_t v) { return __uint_as_float(v & ~3u); }
// Nonzero in the two lowest bits: a word of another layer is among them.
__device__ __forceinline__ uint32_t stale(uint2 v, unsigned n) { return v.x ^ n | v.y ^ n; }
__device__ __forceinline__ uint32_t stale(uint4 v, unsigned n) { return v.x ^ n | v.y ^ n | v.z ^ n | v.w ^ n; }
constexpr float NOTHING = -1e30f;  // the maximum of no scores

template <class D> __device__ __forceinline__ const Task* program(const Shared<D>& s, int layer) {
  return s.tasks + (layer == D::LAYERS ? 2 : layer ? 1 : 0) * MAX_TASKS;
}
// The layer's sums over SMs, of the residual's increments and of the next router's logits: fixed-point numbers whose low byte counts
// who has added. Whoever reads a sum sees in the same word that it is complete, so neither a fence nor a second look is needed, and
// integers add up to the same bits in any order. Layer n uses buffer n % 3; two layers later, when everybody must have read it, the
// buffer is taken back to zero by one more addition, counted like the others.
template <class D> __device__ __forceinline__ unsigned long long* sums_of(const StepArgs& A, unsigned n) {
  return A.sums + n % 3 * Layout<D>::SUMS;
}
// What the count adds to a complete sum: where it started, which is what earlier uses of the buffer left in the low byte, and one for each SM.
__device__ __forceinline__ unsigned long long count_of(const StepArgs& A, unsigned n) {
  return (n / 3 * (A.num_sms + 1) & 0xff) + A.num_sms;
}
__device__ __forceinline__ float number(unsigned long long sum) { return (float)((long long)sum >> 8); }
// A power of two: the unit of the fixed-point numbers is 2^-30 of the residual's magnitude 1 / scale, rounded up.
__device__ __forceinline__ float fixed_point(float scale) { return 0x1p30f * __uint_as_float(__float_as_uint(scale) & 0x7f800000u); }
__device__ __forceinline__ float inverse_of_power(float x) { return __uint_as_float(0x7f000000u - __float_as_uint(x)); }

// Where a warp leaves its part of a head's attention: over the keys and values of its own 8 tokens, which only it reads; the newest
// token alone, which has no page, goes to the buffer of finished rows, idle at that time.
template <class D> __device__ __forceinline__ char* part_of(Shared<D>& s, char* slot, bool paged, int warp, int head) {
  return paged ? slot + head / 4 * (PAGE * HEAD_DIM * 2) + warp * (UNIT * HEAD_DIM * 2) + head % 4 * (HEAD_DIM * 4)
               : (char*)s.rows + head * (HEAD_DIM * 4);
}

// Which pages are loaded ahead of the experts before the attention: as many as leave the other slots to the experts.
template <class D> struct Ahead {
  const Task* attention = nullptr;
  int pages = 0, experts = 0;  // chunks loaded early, chunks consumed before them
  __device__ __forceinline__ Ahead(const StepArgs& A, const Shared<D>& s, int layer) {
    const Task* t = program<D>(s, layer);
    if (t->op != QKV) return;
    for (t++; t->op == EXPERTS_OP; t++) experts += 3 * t->count;
    if (t->op != ATTENTION || experts > 9) return;
    attention = t;
    pages = min(A.early_pages, Share<D>(A, layer, t->count).mine);
  }
};

// ---- producer ----------------------------------------------------------------------------------------------------------
template <class D> __device__ void produce(const StepArgs& A, Shared<D>& s, char* ring) {
  using L = Layout<D>;
  const int lane = threadIdx.x % 32, splits = A.num_sms / D::KV_HEADS;
  Block<D::PROBED> b{A, s.gone, (int)blockIdx.x, 0};
  // The first of this SM's pages in both groups are the same in all layers of a group.
  for (int t = 0; t < MAX_TASKS; t++)
    if (s.tasks[t].op == ATTENTION && s.tasks[t].count >= 0) {
      const Share<D> f(A, 0, s.tasks[t].count), w(A, 1, s.tasks[t].count);
      if (lane < f.mine) s.pages[0][lane] = A.table_full[f.first + s.tasks[t].count + lane * splits];
      if (lane < w.mine) s.pages[1][lane] = A.table_sliding[w.first + s.tasks[t].count + lane * splits];
    }
  // Loads and consumption follow different orders: pages of the KV cache are loaded before the experts that are consumed first, as
  // experts are known late. Load k takes the slot that the (k - SLOTS)-th consumed chunk leaves.
  if (lane < SLOTS) s.order[(lane - SLOTS) & 31] = lane;
  __syncwarp();
  if (lane) return;
  unsigned it = 0, next = 0, used = 0, phases = 0;  // loads, consumptions so far; per slot: ever used, parity of its last use
  unsigned long long recent = 0;                    // slots of the last loads, a nibble each
  LayerPointers following = A.layers[0];
  const unsigned long long policy = ptx::evict_first();
#pragma unroll 1
  for (int layer = 0; layer <= D::LAYERS; layer++) {
    b.layer = layer;
    const LayerPointers w = following;
    if (layer < D::LAYERS) following = A.layers[layer + 1];
    const Ahead<D> ahead(A, s, layer);
    const int sliding = !L::full(layer);
    bool routed = !layer;
#pragma unroll 1
    for (const Task* t = program<D>(s, layer); t->op != END; t++) {
      const int op = t->op, mine = op == ATTENTION ? Share<D>(A, layer, t->count).mine : 0;
      const int chunks = op == ATTENTION ? mine : op == EXPERTS_OP ? 3 * t->count : t->count, early = op == QKV ? ahead.pages : 0;
      if (op == EXPERTS_OP && !routed) {
        routed = true;
        b.wait_bar(&s.routed, layer - 1, PH_ACTIVATIONS);
        b.tick(D::LAYERS, 18, ptx::now());
      }
#pragma unroll 1
      for (int c = op == ATTENTION ? ahead.pages : 0; c < chunks + early; c++) {
        const char* from;
        int bytes = L::ROW_CHUNK;
        unsigned consumed = next + c;
        if (op == ATTENTION || c >= chunks) {
          const Task* attention = op == ATTENTION ? t : ahead.attention;
          const int k = op == ATTENTION ? c : c - chunks;
          if (op == QKV) consumed += ahead.experts;
          int page;
          if (k < 32) page = s.pages[sliding][k];
          else page = (sliding ? A.table_sliding : A.table_full)[Share<D>(A, layer, 0).first + attention->count + k * splits];
          const long long tile = ((long long)L::in_group(layer) * (sliding ? A.pages_sliding : A.pages_full) + page) * D::KV_HEADS + attention->first;
          from = (sliding ? A.kv_sliding : A.kv_full) + tile * L::PAGE_TILE, bytes = L::PAGE_TILE;
        } else if (op == EXPERTS_OP) {
          const int u = t->first + c / 3, piece = c % 3;
          const int unit = layer ? s.experts[u / L::EXPERT_UNITS] * L::EXPERT_UNITS + u % L::EXPERT_UNITS : u;
          from = w.experts + (size_t)unit * L::EXPERT_UNIT + piece * L::ROW_CHUNK, bytes = piece == 2 ? L::COLUMN_CHUNK : L::ROW_CHUNK;
        } else if (op == OPROJ) {
          from = w.oproj + (size_t)(t->first + c) * L::COLUMN_CHUNK, bytes = L::COLUMN_CHUNK;
        } else {
          const int u = t->first + c;
          from = w.qkv + (size_t)u * L::ROW_CHUNK;
          if (op == QKV) {
            const int before = L::pieces_before(u);
            from += before * L::ROUTER_PIECE, bytes += (L::pieces_before(u + 1) - before) * L::ROUTER_PIECE;
          }
        }
        const unsigned slot = s.order[(it - SLOTS) & 31], bit = 1u << slot;
        s.order[consumed & 31] = slot;
        if (used & bit) b.wait_bar(&s.empty[slot], phases >> slot, PH_SLOT), phases ^= bit;
        used |= bit;
        if (it >= A.in_flight) {
          const unsigned last = recent >> 4 * (A.in_flight - 1) & 15;
          if (last != slot) b.wait_bar(&s.full[last], phases >> last, PH_WEIGHTS);
        }
        recent = recent << 4 | slot;
        it++;
        if (*(volatile int*)s.gone) continue;
        ptx::expect(&s.full[slot], bytes);
        ptx::copy_once(ring + slot * L::SLOT, from, bytes, &s.full[slot], policy);
      }
      next += chunks;
    }
  }
  if (*(volatile int*)s.gone) {  // nothing may land after the block has left
    const long long start = ptx::now();
    for (int i = 0; i < SLOTS; i++)
      while (used >> i & 1 && !ptx::passed(&s.full[i], phases >> i & 1) && ptx::now() - start < 1000000) {}
  }
}

// ---- router ------------------------------------------------------------------------------------------------------------
template <class D> __device__ void route(const StepArgs& A, Shared<D>& s) {
  using L = Layout<D>;
  constexpr int N = D::EXPERTS / 32;
  const int lane = threadIdx.x % 32;
  Block<D::PROBED> b{A, s.gone, (int)blockIdx.x, 0};
  for (int layer = 0; layer < D::LAYERS; layer++) {
    b.layer = layer;
    const unsigned n = A.epoch * D::LAYERS + layer;
    if (layer) {
      const unsigned long long* from = sums_of<D>(A, n - 1) + D::HIDDEN + lane;
      const unsigned long long count = count_of(A, n - 1);
      float logit[N];
      unsigned key[N];
      b.wait_bar(&s.hinted, layer - 1, PH_H1);
      b.wait([&] {
        bool all = true;
        unsigned long long v[N];
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = ptx::load(from + 32 * i) - count;
#pragma unroll
        for (int i = 0; i < N; i++) all &= (v[i] & 0xff) == 0, logit[i] = number(v[i]);
        return all;
      }, PH_H1);
      __syncwarp();
      if (lane == 0) b.tick(D::LAYERS, 16, ptx::now());
#pragma unroll
      for (int i = 0; i < N; i++) {  // integers in the order of the floats; the low bits prefer the lower index where 16 bits of mantissa tie
        const unsigned u = __float_as_uint(logit[i]);
        key[i] = (u ^ ((int)u < 0 ? 0xffffffffu : 0x80000000u)) & ~127u | (127 - (lane + 32 * i));
        s.logits[lane + 32 * i] = logit[i];
      }
      int expert = 0;
#pragma unroll
      for (int r = 0; r < D::TOP_K; r++) {
        unsigned best = key[0];
#pragma unroll
        for (int i = 1; i < N; i++) best = max(best, key[i]);
        best = __reduce_max_sync(~0u, best);
#pragma unroll
        for (int i = 0; i < N; i++)
          if (key[i] == best) key[i] = 0;
        if (lane == r) expert = 127 - (best & 127);
      }
      if (lane < D::TOP_K) {
        if (D::PROBED && A.forced) expert = A.forced[layer * D::TOP_K + lane];
        s.experts[lane] = expert & (D::EXPERTS - 1);
        if (b.sm == 0) A.routing[layer * D::TOP_K + lane] = expert;
      }
      __syncwarp();
      if (lane == 0) ptx::arrive(&s.routed), b.tick(D::LAYERS, 17, ptx::now());
    }
    if (n >= 2) {  // everybody has read the buffer of two layers ago
      unsigned long long* idle = sums_of<D>(A, n + 1);
      for (int i = b.sm * 32 + lane; i < L::SUMS; i += A.num_sms * 32) {
        const unsigned long long v = ptx::load(idle + i);
        ptx::add(idle + i, (v + 1 & 0xff) - v);  // the count moves on, the rest becomes zero
      }
    }
  }
}

// ---- helper ------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ float gumbel(unsigned long long seed, unsigned position, unsigned row) {  // Philox4x32-10
  unsigned c0 = row, c1 = position, c2 = 0, c3 = 0, k0 = (unsigned)seed, k1 = (unsigned)(seed >> 32);
#pragma unroll
  for (int i = 0; i < 10; i++) {
    const unsigned h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0, h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
    c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return -__logf(-__logf(((c0 >> 8) + 0.5f) * 0x1p-24f));
}

template <class D> __device__ void help(const StepArgs& A, Shared<D>& s, char* ring) {
  using L = Layout<D>;
  const int lane = threadIdx.x % 32;
  Block<D::PROBED> b{A, s.gone, (int)blockIdx.x, 0};
  unsigned groups = 0, queries = 0;
  float best = -INFINITY;
  int token = 0x7fffffff;
  auto better = [&](float v, int i) {
    if (v > best || (v == best && i < token)) best = v, token = i;
  };
  for (int layer = 0; layer <= D::LAYERS; layer++) {
    b.layer = layer;
    const unsigned n = A.epoch * D::LAYERS + layer;
    const bool rotary = layer == 0 || !L::full(layer);
#pragma unroll 1
    for (const Task* t = program<D>(s, layer); t->op != END; t++) {
      if (t->op == QKV || t->op == HEAD) {
#pragma unroll 1
        for (int at = 0; at < t->count; at += GROUP, groups++) {
          const int buffer = groups & 1, rows = min(GROUP, t->count - at) * UNIT;
          b.wait_bar(&s.rows_full[buffer], groups >> 1, PH_RESULTS);
          const float scale = s.scale;
#pragma unroll 1
          for (int base = 0; base < rows; base += 32) {
            const int i = base + lane, row = (t->first + at) * UNIT + i;
            const bool live = i < rows;
            float v = 0;
            if (live)
#pragma unroll
              for (int w = 0; w < WARPS; w++) v += s.rows[buffer][i / UNIT * WARPS * UNIT + w * UNIT + i % UNIT];
            v *= scale;
            if (t->op == HEAD) {
              if (!live) continue;
              if (A.logits) A.logits[row] = v;
              better(A.inverse_temperature > 0 ? v * A.inverse_temperature + gumbel(A.seed, A.position, row) : v, row);
              continue;
            }
            const int head = row / (L::GROUP_UNITS * UNIT), r = row % (L::GROUP_UNITS * UNIT), part = r / HEAD_DIM;
            const float other = __shfl_xor_sync(~0u, v, 1);
            if (rotary && part <= GROUP) {
              const uint32_t cs = s.rope[r % HEAD_DIM / 2];
              v = row & 1 ? v * ptx::lower(cs) + other * ptx::upper(cs) : v * ptx::lower(cs) - other * ptx::upper(cs);
            }
            const uint32_t word = tagged(v, n);
            if (live) ptx::store(A.qkv + row, word);
            if (live && lane % UNIT == 0) ptx::relaxed_add(b.counter(C_QKV + head), 1);
            if (live && part >= GROUP) {  // the cache gets key and value
              const bool full = L::full(layer);
              const int page = (full ? A.table_full : A.table_sliding)[A.position / PAGE];
              char* pool = full ? A.kv_full : A.kv_sliding;
              const long long tile = ((long long)L::in_group(layer) * (full ? A.pages_full : A.pages_sliding) + page) * D::KV_HEADS + head;
              ((__nv_bfloat16*)(pool + tile * L::PAGE_TILE))[((part - GROUP) * PAGE + A.position % PAGE) * HEAD_DIM + r % HEAD_DIM] =
                  __float2bfloat16(untagged(word));
            }
          }
          __syncwarp();
          if (lane == 0) ptx::arrive(&s.rows_empty[buffer]), b.tick(D::LAYERS, 19, ptx::now());
        }
      } else if (t->op == ATTENTION) {
        const Share<D> share(A, layer, t->count);
        if (t->count < 0) continue;
        const size_t at = (size_t)t->count * D::HEADS + t->first * GROUP;
        if (!share.mine && !share.newest) {
          const uint32_t zero = tagged(0, n);
#pragma unroll 1
          for (int i = 0; i < GROUP; i++) ptx::store4(A.partials + (at + i) * HEAD_DIM + lane * 4, make_uint4(zero, zero, zero, zero));
          if (lane < GROUP) ptx::store2(A.softmax + (at + lane) * 2, make_uint2(tagged(NOTHING, n), zero));
          if (lane == 0) ptx::relaxed_add(b.counter(C_ATTENTION + t->first), 1);
          continue;
        }
        const uint32_t* from = A.qkv + (size_t)t->first * L::GROUP_UNITS * UNIT + lane * 4;
        uint4 word[GROUP + 2];
        if (lane == 0) b.wait_hint(C_QKV + t->first, (n + 1) * L::GROUP_UNITS, PH_H2A, 0);
        __syncwarp();
        b.wait([&] {
          uint32_t old = 0;
#pragma unroll
          for (int i = 0; i < GROUP + 2; i++) word[i] = ptx::load4(from + i * HEAD_DIM);
#pragma unroll
          for (int i = 0; i < GROUP + 2; i++) old |= stale(word[i], n);
          return !(old & 3);
        }, PH_H2A);
        __syncwarp();
        const float scale = 0.08838834764831845f * LOG2E;  // 1 / sqrt(128), for powers of two
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
          const float x = untagged(word[i].x) * scale, y = untagged(word[i].y) * scale, z = untagged(word[i].z) * scale, w = untagged(word[i].w) * scale;
          const uint32_t lo = ptx::pack(x, y), hi = ptx::pack(z, w);
          ((uint2*)s.query[0])[i * 32 + lane] = make_uint2(lo, hi);
          ((uint2*)s.query[1])[i * 32 + lane] = make_uint2(ptx::rest(x, y, lo), ptx::rest(z, w, hi));
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const uint4 v = word[GROUP + i];
          ((uint2*)s.newest[i])[lane] = make_uint2(ptx::pack(untagged(v.x), untagged(v.y)), ptx::pack(untagged(v.z), untagged(v.w)));
        }
        __syncwarp();
        if (lane == 0) ptx::arrive(&s.q_full), b.tick(D::LAYERS, 20, ptx::now());
        // The consumer warps' softmaxes become one.
        b.wait_bar(&s.attended, queries++, PH_RESULTS);
        if (lane == 0) b.tick(D::LAYERS, 21, ptx::now());
        const int warps = share.mine ? WARPS : 1, head = lane % GROUP;
        float top = -INFINITY, total = 0;
#pragma unroll 1
        for (int w = 0; w < warps; w++) top = fmaxf(top, s.maxima[w * GROUP + head]);
        top = untagged(__float_as_uint(top));  // any number near the maximum will do, if all use the same
#pragma unroll 1
        for (int w = 0; w < warps; w++) total += s.totals[w * GROUP + head] * ptx::exp2(s.maxima[w * GROUP + head] - top);
        __syncwarp();
#pragma unroll 1
        for (int w = lane / GROUP; w < warps; w += 32 / GROUP) s.maxima[w * GROUP + head] = ptx::exp2(s.maxima[w * GROUP + head] - top);
        __syncwarp();
        char* slot = ring + s.meeting * L::SLOT;
#pragma unroll 1
        for (int i = 0; i < GROUP; i++) {
          float4 v = make_float4(0, 0, 0, 0);
#pragma unroll
          for (int w = 0; w < WARPS; w++)
            if (w < warps) {
              const float f = s.maxima[w * GROUP + i];
              const float4 p = *(const float4*)(part_of<D>(s, slot, share.mine, w, i) + lane * 16);
              v.x = fmaf(f, p.x, v.x), v.y = fmaf(f, p.y, v.y), v.z = fmaf(f, p.z, v.z), v.w = fmaf(f, p.w, v.w);
            }
          ptx::store4(A.partials + (at + i) * HEAD_DIM + lane * 4, make_uint4(tagged(v.x, n), tagged(v.y, n), tagged(v.z, n), tagged(v.w, n)));
        }
        if (lane < GROUP) ptx::store2(A.softmax + (at + lane) * 2, make_uint2(tagged(top, n), tagged(total, n)));
        __syncwarp();
        if (share.mine && lane < WARPS) ptx::arrive(&s.empty[s.meeting]);
        if (lane == 0) ptx::relaxed_add(b.counter(C_ATTENTION + t->first), 1), b.tick(D::LAYERS, 22, ptx::now());
      } else if (t->op == OPROJ) {
        // 32 channels at a time: 8 lanes a split, 4 splits at once, and all loads on their way before the first is needed.
        const int splits = A.num_sms / D::KV_HEADS, end = t->count * UNIT;
        if (lane == 0)
#pragma unroll 1
          for (int g = t->first * UNIT / HEAD_DIM / GROUP; g <= (t->first * UNIT + end - 1) / HEAD_DIM / GROUP; g++)
            b.wait_hint(C_ATTENTION + g, (n + 1) * splits, PH_H3A, 200);
        __syncwarp();
#pragma unroll 1
        for (int base = 0; base < end; base += 32) {
          constexpr int B = 9, M = L::MAX_SPLITS / 32;
          const int own = base + lane % 8 * 4, channel = t->first * UNIT + min(own, end - 4);
          const int heads[2] = {(t->first * UNIT + base) / HEAD_DIM, (t->first * UNIT + min(base + 31, end - 1)) / HEAD_DIM};
          float m[2][M], sums[2][M];
          uint4 v[B];
          float4 o = make_float4(0, 0, 0, 0);
          const float* weights = s.weights[channel / HEAD_DIM != heads[0]];
          // Parts of splits from..from+35; with the first of them the softmaxes of all.
#pragma unroll 1
          for (int from = 0; from < splits; from += 4 * B) {
            b.wait([&] {
              uint32_t old = 0;
#pragma unroll
              for (int i = 0; i < B; i++)
                v[i] = ptx::load4(A.partials + (size_t)min(from + 4 * i + lane / 8, splits - 1) * D::HEADS * HEAD_DIM + channel);
              if (!from)
#pragma unroll
                for (int j = 0; j < 2 * M; j++) {
                  const uint2 w = ptx::load2(A.softmax + ((size_t)min(lane + 32 * (j % M), splits - 1) * D::HEADS + heads[j / M]) * 2);
                  m[j / M][j % M] = lane + 32 * (j % M) < splits ? untagged(w.x) : NOTHING, sums[j / M][j % M] = untagged(w.y);
                  old |= stale(w, n);
                }
#pragma unroll
              for (int i = 0; i < B; i++) old |= stale(v[i], n);
              return !(old & 3);
            }, PH_H3A);
            __syncwarp();
            if (!from) {
              if (lane == 0) b.tick(D::LAYERS, 23, ptx::now());
#pragma unroll
              for (int k = 0; k < 2; k++) {
                float top = NOTHING, sum = 0;
#pragma unroll
                for (int i = 0; i < M; i++) top = fmaxf(top, m[k][i]);
#pragma unroll 1
                for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
#pragma unroll
                for (int i = 0; i < M; i++) m[k][i] = ptx::exp2(m[k][i] - top), sum = fmaf(m[k][i], sums[k][i], sum);
#pragma unroll 1
                for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
#pragma unroll
                for (int i = 0; i < M; i++) s.weights[k][lane + 32 * i] = m[k][i] * ptx::reciprocal(sum);
              }
              __syncwarp();
            }
#pragma unroll
            for (int i = 0; i < B; i++) {
              const int split = from + 4 * i + lane / 8;
              const float w = split < splits ? weights[split] : 0;
              o.x = fmaf(w, untagged(v[i].x), o.x), o.y = fmaf(w, untagged(v[i].y), o.y);
              o.z = fmaf(w, untagged(v[i].z), o.z), o.w = fmaf(w, untagged(v[i].w), o.w);
            }
          }
#pragma unroll
          for (int j = 8; j < 32; j *= 2) {
            o.x += __shfl_xor_sync(~0u, o.x, j), o.y += __shfl_xor_sync(~0u, o.y, j);
            o.z += __shfl_xor_sync(~0u, o.z, j), o.w += __shfl_xor_sync(~0u, o.w, j);
          }
          if (lane < 8 && own < end) *(float4*)(s.channels + own) = o;
          __syncwarp();
        }
        __syncwarp();
        if (lane == 0) ptx::arrive(&s.o_full);
      }
    }
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) better(__shfl_xor_sync(~0u, best, o), __shfl_xor_sync(~0u, token, o));
  unsigned arrived = 0;
  if (lane == 0) {
    ((int2*)A.best)[b.sm] = make_int2(__float_as_int(best), token);
    arrived = ptx::fetch_add(b.counter(C_TOKEN), 1) + 1;
  }
  if (__shfl_sync(~0u, arrived, 0) != (A.epoch + 1) * A.num_sms) return;
  best = -INFINITY, token = 0x7fffffff;  // the last one to arrive decides
#pragma unroll 1
  for (int i = lane; i < A.num_sms; i += 32) {
    const float2 v = ptx::load2((const float*)A.best + 2 * i);
    better(v.x, __float_as_int(v.y));
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) better(__shfl_xor_sync(~0u, best, o), __shfl_xor_sync(~0u, token, o));
  if (lane == 0 && !*(volatile int*)s.gone) {
    token = (unsigned)token < (unsigned)D::VOCAB ? token : 0;
    A.out[0] = token;
    ptx::store_system(A.mailbox, (unsigned long long)(A.epoch + 1) << 32 | (unsigned)token);
  }
}

// ---- consumers ---------------------------------------------------------------------------------------------------------
template <class D> struct Consumer {
  using L = Layout<D>;
  const StepArgs& A;
  Shared<D>& s;
  char* ring;
  Block<D::PROBED> b;
  int tid, warp, lane, g, t;  // g, t: the lane's row and column in a tensor-core fragment
  unsigned slot = 0, phases = 0, groups = 0, gated = 0, queries = 0, outputs = 0;
  float h[L::ROWS], acc[L::ROWS], router = 0, scale = 1, before = 0;
  // h: residual; acc, router: the layer's partial sums; before: unit of the last layer's sums
  uint32_t xb[2 * L::STEPS];
  unsigned long long history = 0x012345;  // slots of the last chunks, a nibble each, the latest lowest
  unsigned waited = 0;  // cycles, for the timeline

  __device__ __forceinline__ Consumer(const StepArgs& A, Shared<D>& s, char* ring)
      : A(A), s(s), ring(ring), b{A, s.gone, (int)blockIdx.x, 0}, tid(threadIdx.x), warp(tid / 32), lane(tid % 32), g(lane / 4), t(lane % 4) {}

  __device__ __forceinline__ void sync() const { ptx::sync<1, CONSUMERS>(); }
  // Reads the thread's number anew, so that addresses made from it live no longer than a task: kept for the whole step they would be spilled.
  __device__ __forceinline__ void renew() { tid = ptx::thread(), warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4; }
  __device__ __forceinline__ bool timing() const { return D::PROBED && A.ticks && tid == 0; }
  __device__ __forceinline__ void tick(int event, long long value) const {
    b.tick(D::LAYERS, event, value);
  }
  // The next chunk in the order of consumption lies in the slot of the one consumed `back` chunks before.
  __device__ __forceinline__ const char* take(int back) {
    const unsigned start = D::PROBED ? ptx::clock() : 0;
    slot = history >> 4 * (back - 1) & 15;
    b.wait_bar(&s.full[slot], phases >> slot, PH_WEIGHTS);
    if (D::PROBED) waited += ptx::clock() - start;
    return ring + slot * L::SLOT;
  }
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (lane == 0) ptx::arrive(&s.empty[slot]);
    advance();
  }
  __device__ __forceinline__ void advance() {
    phases ^= 1u << slot;
    history = history << 4 | slot;
  }
  __device__ __forceinline__ int row(int i) const { return i * CONSUMERS + tid; }

  __device__ __forceinline__ void load_x() {
#pragma unroll
    for (int i = 0; i < L::STEPS; i++) {
      const uint2 v = *(const uint2*)(s.x + (warp * L::STEPS + i) * 36 + ((g & 3) * 4 + t) * 2);
      xb[2 * i] = v.x, xb[2 * i + 1] = v.y;
    }
  }

  // Adds up the residual, norms it and spreads it over the fragments.
  __device__ __forceinline__ void begin_layer() {
    renew();
    const unsigned n = A.epoch * D::LAYERS + b.layer;
    uint16_t norm[L::ROWS];
#pragma unroll
    for (int i = 0; i < L::ROWS; i++) norm[i] = __ldg((const uint16_t*)A.norms + b.layer * D::HIDDEN + row(i));
    if (timing()) tick(0, ptx::now());
    if (b.layer == 0) {
      const int token = A.token >= 0 ? A.token : A.out[0];
      const char* unit = A.layers[D::LAYERS].qkv + (size_t)(token / UNIT) * L::ROW_CHUNK;
#pragma unroll
      for (int i = 0; i < L::ROWS; i++) {
        const int k = row(i), half = k / (D::HIDDEN / 2), kk = k % (D::HIDDEN / 2);
        const int fragment = kk / 16 * 32 + token % UNIT * 4 + kk % 8 / 2, element = kk % 16 / 8 * 4 + half * 2 + kk % 2;
        h[i] = __uint_as_float((uint32_t)__ldg((const uint16_t*)unit + fragment * 8 + element) << 16);
      }
    } else {
      if (tid == 0) b.wait_hint(C_RESIDUAL, n * A.num_sms, PH_H1, 0), ptx::arrive(&s.hinted);
      sync();
      const unsigned long long* from = sums_of<D>(A, n - 1);
      const unsigned long long count = count_of(A, n - 1);
      unsigned long long v[L::ROWS];
      b.wait([&] {
        bool all = true;
#pragma unroll
        for (int i = 0; i < L::ROWS; i++) v[i] = ptx::load(from + row(i)) - count;
#pragma unroll
        for (int i = 0; i < L::ROWS; i++) all &= (v[i] & 0xff) == 0;
        return all;
      }, PH_H1);
      __syncwarp();
      if (timing()) tick(1, ptx::now());
      const float unit = inverse_of_power(fixed_point(scale));
#pragma unroll
      for (int i = 0; i < L::ROWS; i++) h[i] = fmaf(number(v[i]), unit, h[i]);
      before = unit;
    }
    if (D::PROBED && A.hidden && b.sm == 0)
#pragma unroll
      for (int i = 0; i < L::ROWS; i++) A.hidden[(size_t)b.layer * D::HIDDEN + row(i)] = h[i];
    float squares = 0;
#pragma unroll
    for (int i = 0; i < L::ROWS; i++) squares = fmaf(h[i], h[i], squares);
#pragma unroll
    for (int o = 16; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
    if (lane == 0) s.squares[warp] = squares;
#pragma unroll
    for (int i = 0; i < L::ROWS; i++) {  // even lanes store a pair, odd lanes what its rounding left over
      const float mine = h[i] * __uint_as_float((uint32_t)norm[i] << 16), other = __shfl_xor_sync(~0u, mine, 1);
      const float x = lane & 1 ? other : mine, y = lane & 1 ? mine : other;
      const int k = row(i) & ~1, half = k / (D::HIDDEN / 2), kk = k % (D::HIDDEN / 2);
      const uint32_t rounded = ptx::pack(x, y);
      s.x[kk / 16 * 36 + (half + (lane & 1) * 2) * 8 + kk % 8 / 2 * 2 + kk % 16 / 8] = lane & 1 ? ptx::rest(x, y, rounded) : rounded;
    }
    const Task* qkv = program<D>(s, b.layer);
    if (qkv->op == QKV) {
      const int from = L::pieces_before(qkv->first) * UNIT, to = L::pieces_before(qkv->first + qkv->count) * UNIT;
#pragma unroll
      for (int i = 0; i < L::ROWS; i++)
        if (row(i) >= from && row(i) < to) s.raw[row(i) - from] = h[i];
    }
    sync();
    float total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += s.squares[w];
    scale = rsqrtf(total / D::HIDDEN + 1e-6f);
    if (tid == 0) s.scale = scale;
    load_x();
#pragma unroll
    for (int i = 0; i < L::ROWS; i++) acc[i] = 0;
    router = 0;
    if (timing()) tick(2, ptx::now());
  }

  __device__ __forceinline__ void end_layer() {
    renew();
    const unsigned n = A.epoch * D::LAYERS + b.layer;
    if (b.layer) b.wait_bar(&s.routed, b.layer - 1, PH_ACTIVATIONS);  // no SM falls two layers behind, whether it has experts or not
    if (D::PROBED && b.sm == A.stall_sm) return;
    if (tid == 0) ptx::relaxed_add(b.counter(C_RESIDUAL), 1);
    unsigned long long* to = sums_of<D>(A, n);
    const float factor = fixed_point(scale);
    auto fixed = [&](float v) { return ((unsigned long long)__float2ll_rn(v * factor) << 8) + 1; };
    const float both = router + __shfl_xor_sync(~0u, router, 1);
    if (tid < 2 * D::EXPERTS && tid % 2 == 0) ptx::add(to + D::HIDDEN + tid / 2, fixed(both));
#pragma unroll
    for (int i = 0; i < L::ROWS; i++) ptx::add(to + row(i), fixed(acc[i]));
  }

  // This warp's part of 8 rows, and with some chunks of QKV 8 channels of the next layer's router.
  struct Rows {
    uint4 v[L::STEPS];
    uint2 router;
  };
  __device__ __forceinline__ void load_rows(Rows& r, int back = SLOTS) {
    const char* chunk = take(back);
    const uint4* from = (const uint4*)chunk + warp * L::STEPS * 32 + lane;
#pragma unroll
    for (int i = 0; i < L::STEPS; i++) r.v[i] = from[i * 32];
    if (tid < 2 * D::EXPERTS) r.router = ((const uint2*)(chunk + L::ROW_CHUNK))[tid];
    release();
  }
  // Times the hidden vector: this warp's part of each row goes to out[row].
  __device__ __forceinline__ void multiply_rows(const Rows& r, float* out, const float* raw) {
    float c[4] = {0, 0, 0, 0}, d[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < L::STEPS; i++) {
      if (i & 1) ptx::mma16(d, r.v[i].x, r.v[i].y, r.v[i].z, r.v[i].w, xb[2 * i], xb[2 * i + 1]);
      else ptx::mma16(c, r.v[i].x, r.v[i].y, r.v[i].z, r.v[i].w, xb[2 * i], xb[2 * i + 1]);
    }
    if (raw && tid < 2 * D::EXPERTS) {
      raw += tid % 2 * 4;
      router = fmaf(ptx::lower(r.router.x), raw[0], router), router = fmaf(ptx::upper(r.router.x), raw[1], router);
      router = fmaf(ptx::lower(r.router.y), raw[2], router), router = fmaf(ptx::upper(r.router.y), raw[3], router);
    }
    // Columns 0 and 1 hold both halves of the vector, 2 and 3 what their rounding left over.
    float sum = (c[0] + d[0]) + (c[3] + d[3]);
    sum += __shfl_xor_sync(~0u, sum, 1);
    if (t == 0) out[g] = sum;
  }

  // 8 channels m times their columns, added to the partial sums.
  __device__ __forceinline__ void column_chunk(const float (&m)[UNIT], int back = SLOTS) {
    const char* chunk = take(back);
    const uint4* from = (const uint4*)chunk + tid;
    uint4 v[L::ROWS];
#pragma unroll
    for (int i = 0; i < L::ROWS; i++) v[i] = from[i * 256];
    uint2 p;
    if (tid < 2 * D::EXPERTS) p = ((const uint2*)(chunk + L::ROW_CHUNK))[tid];
    release();
#pragma unroll
    for (int i = 0; i < L::ROWS; i++) {
      acc[i] = fmaf(ptx::lower(v[i].x), m[0], acc[i]), acc[i] = fmaf(ptx::upper(v[i].x), m[1], acc[i]);
      acc[i] = fmaf(ptx::lower(v[i].y), m[2], acc[i]), acc[i] = fmaf(ptx::upper(v[i].y), m[3], acc[i]);
      acc[i] = fmaf(ptx::lower(v[i].z), m[4], acc[i]), acc[i] = fmaf(ptx::upper(v[i].z), m[5], acc[i]);
      acc[i] = fmaf(ptx::lower(v[i].w), m[6], acc[i]), acc[i] = fmaf(ptx::upper(v[i].w), m[7], acc[i]);
    }
    if (tid < 2 * D::EXPERTS) {
      const bool odd = tid % 2;
      router = fmaf(ptx::lower(p.x), odd ? m[4] : m[0], router), router = fmaf(ptx::upper(p.x), odd ? m[5] : m[1], router);
      router = fmaf(ptx::lower(p.y), odd ? m[6] : m[2], router), router = fmaf(ptx::upper(p.y), odd ? m[7] : m[3], router);
    }
  }

  __device__ __forceinline__ void rows(const Task& task, const Rows (&held)[HELD]) {
    renew();
    int piece = L::pieces_before(task.first);
    const int start = piece;
#pragma unroll 1
    for (int at = 0; at < task.count; at += GROUP, groups++) {
      const int buffer = groups & 1;
      if (groups >= 2) b.wait_bar(&s.rows_empty[buffer], (groups >> 1) - 1, PH_RESULTS);
#pragma unroll 1
      for (int j = at; j < min(at + GROUP, task.count); j++) {
        const float* raw = nullptr;
        if (task.op == QKV && L::pieces_before(task.first + j + 1) > piece) raw = s.raw + (piece++ - start) * UNIT;
        Rows r;
        if (j >= HELD) load_rows(r);
#pragma unroll
        for (int k = 0; k < HELD; k++)
          if (j == k) r = held[k];
        multiply_rows(r, s.rows[buffer] + ((j - at) * WARPS + warp) * UNIT, raw);
      }
      __syncwarp();
      if (lane == 0) ptx::arrive(&s.rows_full[buffer]);
    }
  }

  __device__ __forceinline__ void experts(const Task& task, int back) {
    renew();
#pragma unroll 1
    for (int u = task.first; u < task.first + task.count; u++) {
      float* part = s.gated[gated++ & 1];
#pragma unroll 1
      for (int i = 0; i < 2; i++) {
        Rows r;
        load_rows(r, back);
        multiply_rows(r, part + (i * WARPS + warp) * UNIT, nullptr);
      }
      sync();
      float v = 0;
#pragma unroll
      for (int w = 0; w < WARPS / 2; w++) v += part[(lane / 8 % 2 * WARPS + lane / 16 * (WARPS / 2) + w) * UNIT + lane % 8];
      v += __shfl_xor_sync(~0u, v, 16);
      v *= scale;
      const float gate = __shfl_sync(~0u, v, lane % 8), up = __shfl_sync(~0u, v, lane % 8 + 8);
      const float weight = b.layer ? ptx::reciprocal(1.f + __expf(-s.logits[s.experts[u / L::EXPERT_UNITS]] * before * scale)) : 1.f;
      const float middle = gate * ptx::reciprocal(1.f + __expf(-gate)) * up * weight;
      float m[UNIT];
#pragma unroll
      for (int c = 0; c < UNIT; c++) m[c] = __shfl_sync(~0u, middle, c);
      column_chunk(m, back);
    }
  }

  __device__ __forceinline__ void project(const Task& task) {
    renew();
    if (tid * 8 < D::HIDDEN) ptx::touch((const char*)A.norms + ((size_t)(b.layer + 1) * D::HIDDEN + tid * 8) * 2);  // soon wanted
    const long long start = timing() ? ptx::now() : 0;
    b.wait_bar(&s.o_full, outputs++, PH_ACTIVATIONS);
    if (timing()) tick(15, ptx::now() - start);
#pragma unroll 1
    for (int u = 0; u < task.count; u++) {
      const float4 x = *(const float4*)(s.channels + u * UNIT), y = *(const float4*)(s.channels + u * UNIT + 4);
      const float m[UNIT] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
      column_chunk(m);
    }
  }

  // One KV head against its 8 query heads. A warp takes 8 of a page's 64 tokens and keeps a softmax of its own; rows 0-7 of a
  // fragment are the heads, rows 8-15 what rounding them to bf16 left over. Scores are in powers of two.
  struct Softmax {
    float m = -INFINITY, sum = 0, o[16][4];
  };
  // Tokens from..to-1 of 8 rows; rows lie `pitch` bytes apart.
  __device__ __forceinline__ void tokens(Softmax& state, const uint4 (&qh)[4], const uint4 (&ql)[4], const char* keys, const char* values, int pitch, int from, int to) {
    if (to <= 0 || from >= UNIT) return;
    float c[4] = {0, 0, 0, 0}, d[4] = {0, 0, 0, 0};
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = *(const uint4*)(keys + g * pitch + (t + 4 * j) * 16);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      ptx::mma16(c, qh[j].x, ql[j].x, qh[j].y, ql[j].y, v[j].x, v[j].y);
      ptx::mma16(d, qh[j].z, ql[j].z, qh[j].w, ql[j].w, v[j].z, v[j].w);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      v[j] = *(const uint4*)(values + g * pitch + (t + 4 * j) * 16);
      if (g < from || g >= to) v[j] = make_uint4(0, 0, 0, 0);  // what lies there may be anything
    }
    const float s0 = 2 * t >= from && 2 * t < to ? (c[0] + d[0]) + (c[2] + d[2]) : -INFINITY;
    const float s1 = 2 * t + 1 >= from && 2 * t + 1 < to ? (c[1] + d[1]) + (c[3] + d[3]) : -INFINITY;
    float top = fmaxf(s0, s1);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(state.m, fmaxf(top, __shfl_xor_sync(~0u, top, 2)));
    const float f = ptx::exp2(state.m - top), p0 = ptx::exp2(s0 - top), p1 = ptx::exp2(s1 - top);
    state.m = top;
    state.sum = state.sum * f + (p0 + p1);
    if (__any_sync(~0u, f != 1.f))
#pragma unroll
      for (int i = 0; i < 16; i++) state.o[i][0] *= f, state.o[i][1] *= f, state.o[i][2] *= f, state.o[i][3] *= f;
    const uint32_t p = ptx::pack(p0, p1), rest = ptx::rest(p0, p1, p);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      ptx::mma8(state.o[4 * j], p, rest, ptx::transpose(v[j].x));
      ptx::mma8(state.o[4 * j + 1], p, rest, ptx::transpose(v[j].y));
      ptx::mma8(state.o[4 * j + 2], p, rest, ptx::transpose(v[j].z));
      ptx::mma8(state.o[4 * j + 3], p, rest, ptx::transpose(v[j].w));
    }
  }

  __device__ __forceinline__ void attention(const Task& task, const Ahead<D>& ahead) {
    renew();
    const Share<D> share(A, b.layer, task.count);
    if (task.count < 0) return;
    if (share.mine || share.newest) {
      const long long start = timing() ? ptx::now() : 0;
      b.wait_bar(&s.q_full, queries++, PH_ACTIVATIONS);
      if (timing()) tick(14, ptx::now() - start);
      uint4 qh[4], ql[4];
#pragma unroll
      for (int j = 0; j < 4; j++) qh[j] = s.query[0][g * 16 + t + 4 * j], ql[j] = s.query[1][g * 16 + t + 4 * j];
      Softmax state;
#pragma unroll
      for (int i = 0; i < 16; i++) state.o[i][0] = state.o[i][1] = state.o[i][2] = state.o[i][3] = 0;
      const int splits = A.num_sms / D::KV_HEADS, shift = warp * UNIT;
#pragma unroll 1
      for (int k = 0; k < share.mine + share.newest; k++) {
        const bool paged = k < share.mine;
        const int token = (share.first + task.count + k * splits) * PAGE + shift;
        const char *keys = (const char*)s.newest[0], *values = (const char*)s.newest[1];
        int pitch = 0, from = 0, to = warp == 0;
        if (paged) {
          const char* page = take(k < ahead.pages ? SLOTS + ahead.experts : SLOTS);
          keys = page + shift * HEAD_DIM * 2, values = page + (PAGE + shift) * HEAD_DIM * 2;
          pitch = HEAD_DIM * 2, from = share.low - token, to = min(UNIT, A.position - token);
        }
        tokens(state, qh, ql, keys, values, pitch, from, to);
        if (k + 1 < share.mine) release();
      }
      float sum = state.sum;
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      __syncwarp();
      if (share.mine || warp == 0) {  // the helper adds the warps' parts up, in the last page's slot or in one of its own
        if (t == 0) s.maxima[warp * GROUP + g] = state.m, s.totals[warp * GROUP + g] = sum;
        char* to = part_of<D>(s, ring + slot * L::SLOT, share.mine, warp, g) + t * 32;
        const float(&o)[16][4] = state.o;
#pragma unroll
        for (int i = 0; i < 16; i += 2)
          *(float4*)(to + i / 4 * 128 + i % 4 * 8) =
              make_float4(o[i][0] + o[i][2], o[i][1] + o[i][3], o[i + 1][0] + o[i + 1][2], o[i + 1][1] + o[i + 1][3]);
        ptx::fence_async();  // the copy engine writes this slot next
      }
      if (tid == 0) s.meeting = slot;
      __syncwarp();
      if (lane == 0) ptx::arrive(&s.attended);
      if (share.mine) advance();
    }
    load_x();  // its registers were needed here
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int layer = 0; layer <= D::LAYERS; layer++) {
      b.layer = layer;
      // Registers are landing space, too: with the first chunk in them a slot is free while the residual is not there yet.
      const Task* task = program<D>(s, layer);
      Rows held[HELD];
#pragma unroll
      for (int k = 0; k < HELD; k++) load_rows(held[k]);
      begin_layer();
      rows(*task, held);
      const Ahead<D> ahead(A, s, layer);
      int event = 0;
      auto mark = [&] {
        if (!timing()) return;
        tick(3 + event, ptx::now());
        if (event < 5) tick(9 + event, waited);
        waited = 0;
      };
      mark(), event++;
#pragma unroll 1
      for (task++; task->op != END; task++, event++) {
        if (task->op == EXPERTS_OP) experts(*task, task < ahead.attention ? SLOTS - ahead.pages : SLOTS);
        else if (task->op == ATTENTION) attention(*task, ahead);
        else project(*task);
        mark();
      }
      if (layer < D::LAYERS) end_layer();
    }
  }
};

// ---- watchdog ----------------------------------------------------------------------------------------------------------
// Holds the clock, so that waits need none. Ends with the other warps.
template <class D> __device__ void watch(const StepArgs& A, Shared<D>& s) {
  volatile int* gone = s.gone;
  const long long start = ptx::now();
  while (!ptx::passed_within(&s.finished, 0, 20000)) {
    const bool elsewhere = ptx::relaxed((const unsigned*)A.out + 3) != 0;
    if (!elsewhere && ptx::now() - start < A.timeout_ns) continue;
    gone[0] = 1;
    if (elsewhere) return;
    __nanosleep(20000);  // for the first to notice
    const unsigned noticed = gone[1];
    const unsigned long long word = (unsigned long long)(0x80000000u | (noticed >> 8 & 0x3fff) << 16 | noticed & 0xff) << 32 | blockIdx.x;
    atomicCAS((unsigned long long*)(A.out + 2), 0ull, word);
    return;
  }
}

template <class D> __global__ void __launch_bounds__(THREADS, 1) step(const __grid_constant__ StepArgs A) {
  extern __shared__ __align__(128) char memory[];
  Shared<D>& s = *(Shared<D>*)(memory + SLOTS * Layout<D>::SLOT);
  const int tid = threadIdx.x;
  if (tid == 0) {
    for (int i = 0; i < SLOTS; i++) ptx::init(&s.full[i], 1), ptx::init(&s.empty[i], WARPS);
    for (int i = 0; i < 2; i++) ptx::init(&s.rows_full[i], WARPS), ptx::init(&s.rows_empty[i], 1);
    ptx::init(&s.q_full, 1), ptx::init(&s.o_full, 1), ptx::init(&s.attended, WARPS), ptx::init(&s.routed, 1), ptx::init(&s.hinted, 1), ptx::init(&s.finished, WARPS + 3);
    ptx::fence_init();
    s.gone[0] = A.out[3] != 0, s.gone[1] = 0;
  }
  for (int i = tid; i < KINDS * MAX_TASKS; i += THREADS) {
    s.tasks[i] = ((const Task*)A.tasks)[blockIdx.x * KINDS * MAX_TASKS + i];
  }
  if (tid < HEAD_DIM / 2) s.rope[tid] = ((const uint32_t*)A.rope)[(size_t)A.position * (HEAD_DIM / 2) + tid];
  __syncthreads();
  if (tid < CONSUMERS) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    Consumer<D> c(A, s, memory);
    c.run();
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(OTHER_REGISTERS));
    if (tid < CONSUMERS + 32) produce<D>(A, s, memory);
    else if (tid < CONSUMERS + 64) help<D>(A, s, memory);
    else if (tid < CONSUMERS + 96) route<D>(A, s);
    else if (tid == CONSUMERS + 96) watch<D>(A, s);
  }
  if (tid < CONSUMERS + 96 && tid % 32 == 0) ptx::arrive(&s.finished);
}

template <class D> cudaError_t launch(const StepArgs& args, cudaStream_t stream) {
  constexpr size_t bytes = SLOTS * Layout<D>::SLOT + sizeof(Shared<D>);
  static_assert(bytes <= 232448, "shared memory of a block");
  static cudaError_t ready = cudaFuncSetAttribute(step<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
  if (ready != cudaSuccess) return ready;
  void* parameters[] = {const_cast<StepArgs*>(&args)};
  return cudaLaunchCooperativeKernel((const void*)step<D>, dim3(args.num_sms), dim3(THREADS), parameters, bytes, stream);
}

// Probes (times, residuals, forced experts, a stalled SM) are compiled into an instance of their own: their code would take room in the
// instruction cache. Both compute the same bits.
template <class D> struct Plain : D { static constexpr bool PROBED = false; };
template <class D> struct Probed : D { static constexpr bool PROBED = true; };
template <class D> cudaError_t launch_either(const StepArgs& args, cudaStream_t stream) {
  const bool probed = args.forced || args.hidden || args.ticks || args.stall_sm >= 0;
  return probed ? launch<Probed<D>>(args, stream) : launch<Plain<D>>(args, stream);
}
}  // namespace

const char* launch_step(const char* model, const StepArgs& args, void* stream) {
  cudaError_t error;
  if (!strcmp(model, NorthMiniCode::NAME)) error = launch_either<NorthMiniCode>(args, (cudaStream_t)stream);
  else if (!strcmp(model, Small::NAME)) error = launch_either<Small>(args, (cudaStream_t)stream);
  else return "no such model is compiled in";
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

long long wait_step(const volatile unsigned long long* mailbox, unsigned epoch, void* stream) {
  // The stream is asked now and then, as a step that failed leaves no letter.
  for (unsigned n = 1;; n++) {
    const unsigned long long letter = *mailbox;
    if ((unsigned)(letter >> 32) == epoch + 1) return (long long)(unsigned)letter;
    if (n % 100000 == 0 && cudaStreamQuery((cudaStream_t)stream) != cudaErrorNotReady)
      return (unsigned)(*mailbox >> 32) == epoch + 1 ? (long long)(unsigned)*mailbox : -1;
  }
}
