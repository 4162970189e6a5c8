// A model's shape: equal to the Dims of the same name in northchat/engine/schedule.py.
#pragma once
#ifdef __CUDACC__
#define BOTH __host__ __device__
#else
#define BOTH
#endif

struct NorthMiniCode {
  static constexpr const char* NAME = "north_mini_code";
  static constexpr int LAYERS = 49, HIDDEN = 2048, HEADS = 32, KV_HEADS = 4, EXPERTS = 128, TOP_K = 8, INTERMEDIATE = 768,
                       DENSE_INTERMEDIATE = 3072, VOCAB = 262144, WINDOW = 4096, FULL_EVERY = 4;
};

// The same block in small, for quick tests and the sanitizer.
struct Small {
  static constexpr const char* NAME = "small";
  static constexpr int LAYERS = 6, HIDDEN = 1024, HEADS = 16, KV_HEADS = 2, EXPERTS = 32, TOP_K = 4, INTERMEDIATE = 64,
                       DENSE_INTERMEDIATE = 192, VOCAB = 2048, WINDOW = 256, FULL_EVERY = 4;
};

constexpr int UNIT = 8, PAGE = 64, HEAD_DIM = 128, GROUP = 8, WARPS = 8, MAX_TASKS = 8, KINDS = 3, SLOTS = 6, MAX_SMS = 254;
enum Op { END, QKV, EXPERTS_OP, ATTENTION, OPROJ, HEAD };

// Sizes and offsets that follow from a shape; schedule.py computes the same ones.
template <class D> struct Layout {
  static constexpr int STEPS = D::HIDDEN / 2 / WARPS / 16;  // k-steps of 16 that a warp takes of a row chunk
  static constexpr int ROWS = D::HIDDEN / 256;              // residual rows a consumer thread owns
  static constexpr int ROW_CHUNK = UNIT * D::HIDDEN * 2, ROUTER_PIECE = D::EXPERTS * UNIT * 2;
  static constexpr int COLUMN_CHUNK = ROW_CHUNK + ROUTER_PIECE, EXPERT_UNIT = 2 * ROW_CHUNK + COLUMN_CHUNK;
  static constexpr int PAGE_TILE = 2 * PAGE * HEAD_DIM * 2;
  static constexpr int SLOT = COLUMN_CHUNK > PAGE_TILE ? COLUMN_CHUNK : PAGE_TILE;
  static constexpr int SUMS = D::HIDDEN + D::EXPERTS;
  static constexpr int QKV_UNITS = (D::HEADS + 2 * D::KV_HEADS) * HEAD_DIM / UNIT, PIECES = D::HIDDEN / UNIT;
  static constexpr int GROUP_UNITS = QKV_UNITS / D::KV_HEADS;  // units of one KV head: queries, key, value
  static constexpr int MAX_SPLITS = (MAX_SMS / D::KV_HEADS + 31) / 32 * 32;
  static constexpr int EXPERT_UNITS = D::INTERMEDIATE / UNIT;
  static_assert(D::HEADS == GROUP * D::KV_HEADS && D::HIDDEN % 1024 == 0 && D::EXPERTS % 32 == 0 && D::EXPERTS <= 128);
  static_assert((D::EXPERTS & (D::EXPERTS - 1)) == 0 && PIECES <= QKV_UNITS && D::TOP_K <= 8);
  BOTH static constexpr int pieces_before(int unit) { return unit * PIECES / QKV_UNITS; }
  BOTH static constexpr bool full(int layer) { return layer % D::FULL_EVERY == 0; }
  BOTH static constexpr int full_before(int layer) { return (layer + D::FULL_EVERY - 1) / D::FULL_EVERY; }
  BOTH static constexpr int in_group(int layer) { return full(layer) ? full_before(layer) : layer - full_before(layer); }
};
