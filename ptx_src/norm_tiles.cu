// Channels first: neighbouring rows lie next to each other, columns are strided (NCHW, axis 1).
//
// Mapping. A tile is NJI_ROW_LANES * NJI_VEC neighbouring rows by all columns. A thread takes NJI_VEC
// neighbouring rows in one access and NJI_CHUNKS columns, NJI_COL_LANES apart; row lanes are the
// fastest index, so that a warp has NJI_SPAN neighbouring column lanes. Tiles run along the last row
// dim and end with it; blocks walk over tiles with a stride of the grid. x and dy pass through
// NJI_STAGES tiles of shared memory: a thread copies there what it alone reads, and asks for the next
// tile as soon as it is done with a pack. Without stages a tile is fetched when its turn comes. rows
// >= 1, one col dim. No atomics; the order of every sum is fixed. Offsets are 64-bit.
//
// The build defines, beside the types: NJI_COLS, NJI_VEC, NJI_ROW_LANES, NJI_COL_LANES, NJI_CHUNKS
// (as few as cover the columns), NJI_STAGES, NJI_BLOCKS (per multiprocessor, at least), NJI_P
// (parameter type), NJI_FORWARD (0 or 1), NJI_HAS_GAMMA, NJI_HAS_BETA, NJI_GRADS, NJI_ACCUMULATE.

#define NJI_THREADS (NJI_ROW_LANES * NJI_COL_LANES)
#define NJI_WARPS (NJI_THREADS / 32)
#define NJI_TILE (NJI_ROW_LANES * NJI_VEC) // rows of a tile
#define NJI_SPAN (32 / NJI_ROW_LANES)      // column lanes of a warp
#define NJI_SLOTS (NJI_STAGES > 0 ? NJI_STAGES : 1)

// Rows for which a thread ends up with what its warp found.
#define NJI_HELD (NJI_VEC > NJI_SPAN ? NJI_VEC / NJI_SPAN : 1)

#define NJI_WANT_DX ((NJI_GRADS & 1) != 0)
#define NJI_WANT_DGAMMA ((NJI_GRADS & 2) != 0)
#define NJI_WANT_DBETA ((NJI_GRADS & 4) != 0)
#define NJI_WANT_X (NJI_FORWARD || NJI_WANT_DX || NJI_WANT_DGAMMA)

#define NJI_KERNEL extern "C" __global__ void __launch_bounds__(NJI_THREADS, NJI_BLOCKS)

template <int CODE> struct nji_coded;
template <> struct nji_coded<NJI_CODE_F16> {
    typedef nji_f16 type;
};
template <> struct nji_coded<NJI_CODE_BF16> {
    typedef nji_bf16 type;
};
template <> struct nji_coded<NJI_CODE_F32> {
    typedef float type;
};
template <> struct nji_coded<NJI_CODE_F64> {
    typedef double type;
};
typedef nji_coded<NJI_STAT_CODE>::type nji_stat;

typedef nji_pack<NJI_X, NJI_VEC> nji_pack_x;
typedef nji_pack<nji_stat, NJI_VEC> nji_pack_stat;
typedef nji_pack<nji_real, NJI_VEC> nji_pack_rows;
typedef nji_pack<nji_real, NJI_HELD> nji_pack_held;

// ---- where a thread works -----------------------------------------------------------------------

// A thread's place in every tile.
struct nji_lane {
    int row, col, warp;
    int held;     // the first of its NJI_HELD rows, of the NJI_VEC
    bool is_copy; // another lane holds the same
};

NJI_INLINE nji_lane nji_my_lane() {
    nji_lane lane;
    lane.row = threadIdx.x % NJI_ROW_LANES;
    lane.col = threadIdx.x / NJI_ROW_LANES;
    lane.warp = threadIdx.x / 32;
    lane.held = 0;
    lane.is_copy = false;
#pragma unroll
    for (int step = 0; (NJI_ROW_LANES << step) < 32; step++) {
        const bool upper = (threadIdx.x & (NJI_ROW_LANES << step)) != 0;
        const int count = NJI_VEC >> (step + 1);
        if (upper) lane.held += count;
        if (upper && count == 0) lane.is_copy = true;
    }
    return lane;
}

NJI_INLINE int nji_column(const nji_lane &lane, int chunk) {
    return chunk * NJI_COL_LANES + lane.col;
}

// Folds to true but for the last chunk, and there too where the threads cover the columns exactly.
NJI_INLINE bool nji_is_column(const nji_lane &lane, int chunk) {
    return (chunk + 1) * NJI_COL_LANES <= NJI_COLS || nji_column(lane, chunk) < NJI_COLS;
}

NJI_INLINE nji_i64 nji_col_stride(const nji_problem &p, const nji_operand &operand) {
    return operand.stride[p.row_dims];
}

// From one chunk to the next, in elements.
NJI_INLINE nji_i64 nji_chunk_stride(const nji_problem &p, const nji_operand &operand) {
    return NJI_COL_LANES * nji_col_stride(p, operand);
}

// A block's way over the tiles: runs of the last row dim, tiles within a run.
struct nji_walk {
    nji_i64 run, tile;
    nji_i64 runs, tiles;         // how many there are; tiles: in a run
    nji_i64 run_step, tile_step; // to the block's next tile
};

NJI_INLINE nji_walk nji_first_tile(const nji_problem &p) {
    const nji_i64 inner = p.extent[p.row_dims - 1];
    nji_walk walk;
    walk.tiles = (inner + NJI_TILE - 1) / NJI_TILE;
    walk.runs = nji_divide(p.rows, inner);
    walk.run = nji_divide(blockIdx.x, walk.tiles);
    walk.tile = blockIdx.x - walk.run * walk.tiles;
    walk.run_step = nji_divide(gridDim.x, walk.tiles);
    walk.tile_step = gridDim.x - walk.run_step * walk.tiles;
    return walk;
}

NJI_INLINE void nji_next_tile(nji_walk &walk) {
    walk.run += walk.run_step;
    walk.tile += walk.tile_step;
    if (walk.tile >= walk.tiles) {
        walk.tile -= walk.tiles;
        walk.run++;
    }
}

// Where a thread's rows lie at its first column, in elements.
struct nji_spot {
    bool is_here; // the tile exists, and the thread's rows in it
    nji_offsets at;
};

NJI_INLINE nji_spot nji_spot_of(const nji_problem &p, const nji_operand &out, const nji_lane &lane,
                                const nji_walk &walk) {
    const int last = p.row_dims - 1;
    const nji_i64 in_run = walk.tile * NJI_TILE + lane.row * NJI_VEC;
    nji_spot spot;
    nji_i64 run = walk.run;
    // A run is a multiple of NJI_VEC.
    spot.is_here = run < walk.runs && in_run < p.extent[last];
    spot.at.x = in_run + lane.col * nji_col_stride(p, p.x);
    spot.at.dy = in_run + lane.col * nji_col_stride(p, p.dy);
    spot.at.out = in_run + lane.col * nji_col_stride(p, out);
    spot.at.mean = in_run * p.mean.stride[last];
    spot.at.rstd = in_run * p.rstd.stride[last];
#pragma unroll 1
    for (int d = last - 1; d >= 0; d--) {
        nji_i64 outer = 0, index = run;
        if (d > 0) {
            outer = nji_divide(run, p.extent[d]);
            index = run - outer * p.extent[d];
        }
        spot.at.x += index * p.x.stride[d];
        spot.at.dy += index * p.dy.stride[d];
        spot.at.out += index * out.stride[d];
        spot.at.mean += index * p.mean.stride[d];
        spot.at.rstd += index * p.rstd.stride[d];
        run = outer;
    }
    return spot;
}

// ---- tiles in shared memory ---------------------------------------------------------------------

// What passes through: x, or dy and x.
#define NJI_OPERANDS (NJI_FORWARD || !NJI_WANT_X ? 1 : 2)
#define NJI_FIRST (NJI_FORWARD ? p.x : p.dy)

extern __shared__ __align__(16) unsigned char nji_ring[];

// A thread's first pack in a slot.
NJI_INLINE nji_pack_x *nji_packs(int slot) {
    return (nji_pack_x *)nji_ring + slot * (NJI_OPERANDS * NJI_CHUNKS * NJI_THREADS) + threadIdx.x;
}

NJI_INLINE int nji_pack_index(int which, int chunk) {
    return (which * NJI_CHUNKS + chunk) * NJI_THREADS;
}

// What a warp's threads share of a tile: the first column of x, or the statistics.
#if NJI_FORWARD
__shared__ __align__(16) NJI_X nji_heads[NJI_SLOTS][NJI_WARPS][1][NJI_TILE];
#else
__shared__ __align__(16) nji_stat nji_heads[NJI_SLOTS][NJI_WARPS][2][NJI_TILE];
#endif

// To shared memory: at once, or some time before nji_arrive.
template <int BYTES> NJI_INLINE void nji_fetch_bytes(void *shared, const void *from) {
    typedef typename nji_word<BYTES>::type word;
#if NJI_STAGES > 0
    if (BYTES >= 4) nji_copy_async<BYTES>(shared, from);
    else *(word *)shared = *(const word *)from;
#else
    *(word *)shared = *(const word *)from;
#endif
}

// Takes a tile's packs, chunk by chunk.
struct nji_fetcher {
    bool is_here;
    const NJI_X *first, *second;
    nji_pack_x *to;
};

NJI_INLINE nji_fetcher nji_fetcher_of(const nji_problem &p, const nji_lane &lane,
                                      const nji_spot &spot, int slot) {
    nji_fetcher fetcher;
    fetcher.is_here = spot.is_here;
    fetcher.first = (const NJI_X *)NJI_FIRST.data + (NJI_FORWARD ? spot.at.x : spot.at.dy);
    fetcher.second = (const NJI_X *)p.x.data + spot.at.x;
    fetcher.to = nji_packs(slot);
    return fetcher;
}

NJI_INLINE void nji_fetch_chunk(const nji_problem &p, const nji_lane &lane, nji_fetcher &fetcher,
                                int chunk) {
    if (fetcher.is_here && nji_is_column(lane, chunk)) {
        nji_fetch_bytes<nji_pack_x::BYTES>(fetcher.to + nji_pack_index(0, chunk), fetcher.first);
        if (NJI_OPERANDS == 2) {
            nji_fetch_bytes<nji_pack_x::BYTES>(fetcher.to + nji_pack_index(1, chunk),
                                               fetcher.second);
        }
    }
    fetcher.first += nji_chunk_stride(p, NJI_FIRST);
    fetcher.second += nji_chunk_stride(p, p.x);
}

// The warp must have met since it read the slot's.
NJI_INLINE void nji_fetch_heads(const nji_problem &p, const nji_lane &lane, const nji_spot &spot,
                                int slot) {
    if (!spot.is_here) return;
#if NJI_FORWARD
    if (lane.col % NJI_SPAN != 0) return;
    nji_fetch_bytes<nji_pack_x::BYTES>(&nji_heads[slot][lane.warp][0][lane.row * NJI_VEC],
                                       (const NJI_X *)p.x.data + spot.at.x -
                                           lane.col * nji_col_stride(p, p.x));
#else
    if (lane.is_copy || !NJI_WANT_X) return;
#pragma unroll
    for (int i = 0; i < NJI_HELD; i++) {
        const int row = lane.held + i, in_tile = lane.row * NJI_VEC + row, last = p.row_dims - 1;
        nji_fetch_bytes<sizeof(nji_stat)>(&nji_heads[slot][lane.warp][0][in_tile],
                                          (const nji_stat *)p.mean.data + spot.at.mean +
                                              row * p.mean.stride[last]);
        nji_fetch_bytes<sizeof(nji_stat)>(&nji_heads[slot][lane.warp][1][in_tile],
                                          (const nji_stat *)p.rstd.data + spot.at.rstd +
                                              row * p.rstd.stride[last]);
    }
#endif
}

NJI_INLINE void nji_fetch_tile(const nji_problem &p, const nji_lane &lane, const nji_spot &spot,
                               int slot) {
    nji_fetcher fetcher = nji_fetcher_of(p, lane, spot, slot);
    nji_fetch_heads(p, lane, spot, slot);
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) nji_fetch_chunk(p, lane, fetcher, k);
}

// Before the first tile: fills the ring. `ahead` becomes the first tile that is not in it.
NJI_INLINE void nji_fill(const nji_problem &p, const nji_operand &out, const nji_lane &lane,
                         nji_walk &ahead) {
#if NJI_STAGES > 0
#pragma unroll 1
    for (int slot = 0; slot < NJI_STAGES; slot++) {
        nji_fetch_tile(p, lane, nji_spot_of(p, out, lane, ahead), slot);
        nji_copy_commit();
        nji_next_tile(ahead);
    }
#endif
}

// The tile whose turn it is lies in its slot, for the whole warp.
NJI_INLINE void nji_arrive(const nji_problem &p, const nji_lane &lane, const nji_spot &spot,
                           int slot) {
#if NJI_STAGES > 0
    nji_copy_wait<NJI_STAGES - 1>();
#else
    nji_fetch_tile(p, lane, spot, slot);
#endif
    __syncwarp();
}

// The thread is done with a chunk: the next tile's may come.
NJI_INLINE void nji_refill_chunk(const nji_problem &p, const nji_lane &lane, nji_fetcher &fetcher,
                                 int chunk) {
    if (NJI_STAGES > 0) nji_fetch_chunk(p, lane, fetcher, chunk);
}

// After the chunks.
NJI_INLINE void nji_refill_end(const nji_problem &p, const nji_lane &lane, const nji_spot &next,
                               int slot) {
    __syncwarp();
#if NJI_STAGES > 0
    nji_fetch_heads(p, lane, next, slot);
    nji_copy_commit();
#endif
}

NJI_INLINE int nji_next_slot(int slot) {
    return slot + 1 == NJI_SLOTS ? 0 : slot + 1;
}

// ---- what columns give for a row ----------------------------------------------------------------

#if NJI_FORWARD

// Columns of `lanes` neighbouring column lanes.
NJI_INLINE int nji_columns_of(int first_lane, int lanes) {
    const int left = NJI_COLS - (NJI_CHUNKS - 1) * NJI_COL_LANES - first_lane; // in the last chunk
    return (NJI_CHUNKS - 1) * lanes + (left < 0 ? 0 : left < lanes ? left : lanes);
}

// How two neighbouring groups of column lanes count when they are joined.
struct nji_weights {
    nji_real low, high, spread;
};

NJI_INLINE nji_weights nji_weigh(int first_lane, int low_lanes, int high_lanes) {
    const bool exact = NJI_CHUNKS * NJI_COL_LANES == NJI_COLS;
    const int low = exact ? low_lanes : nji_columns_of(first_lane, low_lanes);
    const int high = exact ? high_lanes : nji_columns_of(first_lane + low_lanes, high_lanes);
    const nji_real one = low + high > 0 ? (nji_real)1 / (nji_real)(low + high) : 0;
    nji_weights weights;
    weights.low = (nji_real)low * one;
    weights.high = (nji_real)high * one;
    weights.spread = weights.low * (nji_real)(exact ? high * NJI_CHUNKS : high);
    return weights;
}

// a: mean, b: sum of the squared distances from it. Two groups of columns become one; `upper` says
// that a and b are of the group of higher columns. The result is the same in bits either way.
NJI_INLINE void nji_join(const nji_weights &weights, bool upper, nji_real &a, nji_real &b,
                         nji_real other_a, nji_real other_b) {
    const nji_real delta = other_a - a;
    const nji_real low = upper ? other_a : a, high = upper ? a : other_a;
    a = low * weights.low + high * weights.high;
    b = b + other_b + delta * delta * weights.spread;
}

#else

// Sums need no weights.
struct nji_weights {};

NJI_INLINE nji_weights nji_weigh(int, int, int) {
    return nji_weights();
}

NJI_INLINE void nji_join(const nji_weights &, bool, nji_real &a, nji_real &b, nji_real other_a,
                         nji_real other_b) {
    a += other_a;
    b += other_b;
}

#endif

#if NJI_WARPS > 1 || NJI_SPAN > 1
// Two halves take turns, so that one barrier for each tile suffices.
__shared__ __align__(16) nji_real nji_exchange[2][NJI_WARPS][2][NJI_TILE];
#endif

// From a and b of a thread's columns, for its rows, to those of all columns, for the rows that it
// holds: the first NJI_HELD of a and b. Within a warp lanes trade halves of their rows, so that each
// step moves half as much. `turn` counts the calls.
NJI_INLINE void nji_join_columns(const nji_lane &lane, nji_real a[NJI_VEC], nji_real b[NJI_VEC],
                                 int turn) {
    // Bounds are constant, so that a and b stay in registers.
#pragma unroll
    for (int step = 0; (NJI_ROW_LANES << step) < 32; step++) {
        const int distance = NJI_ROW_LANES << step, lanes = 1 << step;
        const int count = NJI_VEC >> (step + 1);
        const bool upper = (threadIdx.x & distance) != 0;
        const nji_weights weights = nji_weigh(lane.col / (2 * lanes) * (2 * lanes), lanes, lanes);
#pragma unroll
        for (int i = 0; i < (NJI_VEC + 1) / 2; i++) {
            if (i >= count && i > 0) continue;
            const nji_real kept_a = upper ? a[i + count] : a[i], kept_b = upper ? b[i + count] : b[i];
            const nji_real got_a = nji_swap(upper ? a[i] : a[i + count], distance);
            const nji_real got_b = nji_swap(upper ? b[i] : b[i + count], distance);
            a[i] = kept_a;
            b[i] = kept_b;
            nji_join(weights, upper, a[i], b[i], got_a, got_b);
        }
    }
#if NJI_WARPS > 1
    nji_real(*slots)[2][NJI_TILE] = nji_exchange[turn & 1];
    const int at = lane.row * NJI_VEC + lane.held;
    nji_pack_held pack;
    if (!lane.is_copy) {
        pack.narrow(a);
        pack.store(&slots[lane.warp][0][at]);
        pack.narrow(b);
        pack.store(&slots[lane.warp][1][at]);
    }
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < NJI_WARPS; warp++) {
        const nji_weights weights = nji_weigh(0, warp * NJI_SPAN, NJI_SPAN);
        nji_real other_a[NJI_HELD], other_b[NJI_HELD];
        pack.load(&slots[warp][0][at]);
        pack.widen(other_a);
        pack.load(&slots[warp][1][at]);
        pack.widen(other_b);
#pragma unroll
        for (int i = 0; i < NJI_HELD; i++) {
            if (warp == 0) a[i] = other_a[i];
            if (warp == 0) b[i] = other_b[i];
            else nji_join(weights, false, a[i], b[i], other_a[i], other_b[i]);
        }
    }
#endif
}

// From the rows that a thread holds, the first NJI_HELD of a and b, to all its rows. The other half of
// the exchange is the warp's own until it joins the next tile's columns.
NJI_INLINE void nji_spread(const nji_lane &lane, nji_real a[NJI_VEC], nji_real b[NJI_VEC],
                           int turn) {
#if NJI_SPAN > 1
    nji_real(*mine)[NJI_TILE] = nji_exchange[(turn + 1) & 1][lane.warp];
    nji_pack_held held;
    nji_pack_rows all;
    if (!lane.is_copy) {
        held.narrow(a);
        held.store(&mine[0][lane.row * NJI_VEC + lane.held]);
        held.narrow(b);
        held.store(&mine[1][lane.row * NJI_VEC + lane.held]);
    }
    __syncwarp();
    all.load(&mine[0][lane.row * NJI_VEC]);
    all.widen(a);
    all.load(&mine[1][lane.row * NJI_VEC]);
    all.widen(b);
#endif
}

NJI_INLINE nji_real nji_load_param(const nji_problem &p, const nji_operand &operand, int column) {
    return nji_widen(((const NJI_P *)operand.data)[column * nji_col_stride(p, operand)]);
}

#if NJI_FORWARD

// A row's first element, from which distances are measured: near the others, however far they are
// from 0. Only finite ones will do.
NJI_INLINE nji_real nji_origin(NJI_X first) {
    const nji_real value = nji_widen(first);
    return value - value == 0 ? value : 0;
}

// Mean and sum of squared distances from it of a thread's columns, for each of its rows; means count
// from the rows' origins. Two passes: one pass cancels when a few columns stand out.
NJI_INLINE void nji_thread_moments(const nji_lane &lane, const nji_pack_x *packs,
                                   const nji_real origin[NJI_VEC], nji_real mean[NJI_VEC],
                                   nji_real squares[NJI_VEC]) {
    const int count = nji_columns_of(lane.col, 1);
    const nji_real one = count > 0 ? (nji_real)1 / (nji_real)count : 0;
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) {
        nji_real value[NJI_VEC];
        if (!nji_is_column(lane, k)) continue;
        packs[nji_pack_index(0, k)].widen(value);
#pragma unroll
        for (int i = 0; i < NJI_VEC; i++) mean[i] += value[i] - origin[i];
    }
#pragma unroll
    for (int i = 0; i < NJI_VEC; i++) mean[i] *= one;
    __syncwarp(); // the compiler must read again: there are no registers for all chunks
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) {
        nji_real value[NJI_VEC];
        if (!nji_is_column(lane, k)) continue;
        packs[nji_pack_index(0, k)].widen(value);
#pragma unroll
        for (int i = 0; i < NJI_VEC; i++) {
            const nji_real distance = value[i] - origin[i] - mean[i];
            squares[i] += distance * distance;
        }
    }
}

// mean and rstd of the rows that a thread of the first warp holds.
NJI_INLINE void nji_write_held(const nji_problem &p, const nji_lane &lane, const nji_spot &spot,
                               int slot, const nji_real mean[NJI_VEC],
                               const nji_real rstd[NJI_VEC]) {
    const NJI_X *heads = nji_heads[slot][0][0] + lane.row * NJI_VEC + lane.held;
    if (lane.warp > 0 || lane.is_copy || !spot.is_here) return;
#pragma unroll
    for (int i = 0; i < NJI_HELD; i++) {
        nji_offsets at = spot.at;
        at.mean += (lane.held + i) * p.mean.stride[p.row_dims - 1];
        at.rstd += (lane.held + i) * p.rstd.stride[p.row_dims - 1];
        nji_write_stats(p, at, nji_origin(heads[i]) + mean[i], rstd[i]);
    }
}

// y, mean, rstd. y may be x.
NJI_KERNEL nj_tiles_forward(NJI_PARAMETER p) {
    const nji_lane lane = nji_my_lane();
    nji_walk walk = nji_first_tile(p), ahead = walk;
    nji_real gamma[NJI_CHUNKS], beta[NJI_CHUNKS];
    int slot = 0;
    nji_begin();
    nji_fill(p, p.y, lane, ahead);
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) {
        const int column = nji_column(lane, k);
        gamma[k] = 1;
        beta[k] = 0;
        if (NJI_HAS_GAMMA && nji_is_column(lane, k)) gamma[k] = nji_load_param(p, p.gamma, column);
        if (NJI_HAS_BETA && nji_is_column(lane, k)) beta[k] = nji_load_param(p, p.beta, column);
    }
#pragma unroll 1
    for (int turn = 0; walk.run < walk.runs; turn++) {
        const nji_spot here = nji_spot_of(p, p.y, lane, walk);
        const nji_spot next = nji_spot_of(p, p.y, lane, ahead);
        const nji_pack_x *packs = nji_packs(slot);
        nji_real origin[NJI_VEC], mean[NJI_VEC], rstd[NJI_VEC];
        nji_arrive(p, lane, here, slot);
#pragma unroll
        for (int i = 0; i < NJI_VEC; i++) {
            origin[i] = nji_origin(nji_heads[slot][lane.warp][0][lane.row * NJI_VEC + i]);
            mean[i] = rstd[i] = 0;
        }
        nji_thread_moments(lane, packs, origin, mean, rstd);
        nji_join_columns(lane, mean, rstd, turn);
#pragma unroll
        for (int i = 0; i < NJI_HELD; i++) {
            rstd[i] = nji_rsqrt(rstd[i] / (nji_real)NJI_COLS + (nji_real)p.eps);
        }
        nji_write_held(p, lane, here, slot, mean, rstd);
        nji_spread(lane, mean, rstd, turn);
        nji_fetcher fetcher = nji_fetcher_of(p, lane, next, slot);
        NJI_X *to = (NJI_X *)p.y.data + here.at.out;
        // The next chunk is read before this one is refilled: the compiler keeps that order.
        nji_pack_x pack = packs[nji_pack_index(0, 0)];
#pragma unroll
        for (int k = 0; k < NJI_CHUNKS; k++) {
            nji_real value[NJI_VEC];
            nji_pack_x out;
            pack.widen(value);
            if (k + 1 < NJI_CHUNKS) pack = packs[nji_pack_index(0, k + 1)];
#pragma unroll
            for (int i = 0; i < NJI_VEC; i++) {
                value[i] = (value[i] - origin[i] - mean[i]) * rstd[i];
                if (NJI_HAS_GAMMA) value[i] *= gamma[k];
                if (NJI_HAS_BETA) value[i] += beta[k];
            }
            out.narrow(value);
            if (here.is_here && nji_is_column(lane, k)) out.store(to);
            to += nji_chunk_stride(p, p.y);
            nji_refill_chunk(p, lane, fetcher, k);
        }
        nji_refill_end(p, lane, next, slot);
        nji_next_tile(walk);
        nji_next_tile(ahead);
        slot = nji_next_slot(slot);
    }
}

#else

// A parameter gradient of a column, summed over the row lanes, to the block's part of the
// workspace.
NJI_INLINE void nji_write_part(const nji_problem &p, const nji_lane &lane,
                               const nji_real gradient[NJI_CHUNKS], int which) {
    nji_real *to = (nji_real *)p.partial + ((nji_i64)blockIdx.x * 2 + which) * NJI_COLS;
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) {
        const nji_real sum = nji_lanes_sum<NJI_ROW_LANES>(gradient[k]);
        if (lane.row == 0 && nji_is_column(lane, k)) to[nji_column(lane, k)] = sum;
    }
}

// dx and one part of the parameter gradients for each block. dx may be x or dy.
NJI_KERNEL nj_tiles_backward(NJI_PARAMETER p) {
    const nji_lane lane = nji_my_lane();
    nji_walk walk = nji_first_tile(p), ahead = walk;
    nji_real gamma[NJI_CHUNKS], dgamma[NJI_CHUNKS], dbeta[NJI_CHUNKS];
    int slot = 0;
    nji_begin();
    nji_fill(p, p.dx, lane, ahead);
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) {
        dgamma[k] = dbeta[k] = 0;
        gamma[k] = 1;
        if (NJI_HAS_GAMMA && NJI_WANT_DX && nji_is_column(lane, k)) {
            gamma[k] = nji_load_param(p, p.gamma, nji_column(lane, k));
        }
    }
#pragma unroll 1
    for (int turn = 0; walk.run < walk.runs; turn++) {
        const nji_spot here = nji_spot_of(p, p.dx, lane, walk);
        const nji_spot next = nji_spot_of(p, p.dx, lane, ahead);
        const nji_pack_x *packs = nji_packs(slot);
        nji_fetcher fetcher = nji_fetcher_of(p, lane, next, slot);
        nji_real mean[NJI_VEC], rstd[NJI_VEC], sum_g[NJI_VEC], sum_gx[NJI_VEC];
        nji_pack_stat stats;
        nji_arrive(p, lane, here, slot);
        stats.load(nji_heads[slot][lane.warp][0] + lane.row * NJI_VEC);
        stats.widen(mean);
        stats.load(nji_heads[slot][lane.warp][1] + lane.row * NJI_VEC);
        stats.widen(rstd);
#pragma unroll
        for (int i = 0; i < NJI_VEC; i++) sum_g[i] = sum_gx[i] = 0;
        if (here.is_here) {
#pragma unroll
            for (int k = 0; k < NJI_CHUNKS; k++) {
                nji_real xhat[NJI_VEC], g[NJI_VEC];
                if (!nji_is_column(lane, k)) continue;
                packs[nji_pack_index(0, k)].widen(g);
                if (NJI_WANT_X) packs[nji_pack_index(1, k)].widen(xhat);
#pragma unroll
                for (int i = 0; i < NJI_VEC; i++) {
                    if (NJI_WANT_X) xhat[i] = (xhat[i] - mean[i]) * rstd[i];
                    if (NJI_WANT_DGAMMA) dgamma[k] += g[i] * xhat[i];
                    if (NJI_WANT_DBETA) dbeta[k] += g[i];
                    if (NJI_WANT_DX) {
                        if (NJI_HAS_GAMMA) g[i] *= gamma[k];
                        sum_g[i] += g[i];
                        sum_gx[i] += g[i] * xhat[i];
                    }
                }
            }
        }
        if (NJI_WANT_DX) {
            NJI_X *to = (NJI_X *)p.dx.data + here.at.out;
            nji_join_columns(lane, sum_g, sum_gx, turn);
#pragma unroll
            for (int i = 0; i < NJI_HELD; i++) {
                sum_g[i] /= (nji_real)NJI_COLS;
                sum_gx[i] /= (nji_real)NJI_COLS;
            }
            nji_spread(lane, sum_g, sum_gx, turn);
#pragma unroll
            for (int i = 0; i < NJI_VEC; i++) sum_gx[i] *= rstd[i];
            // The next chunk is read before this one is refilled: the compiler keeps that order.
            nji_pack_x dy_pack = packs[nji_pack_index(0, 0)];
            nji_pack_x x_pack = packs[nji_pack_index(1, 0)];
#pragma unroll
            for (int k = 0; k < NJI_CHUNKS; k++) {
                nji_real x[NJI_VEC], g[NJI_VEC];
                nji_pack_x out;
                dy_pack.widen(g);
                x_pack.widen(x);
                if (k + 1 < NJI_CHUNKS) {
                    dy_pack = packs[nji_pack_index(0, k + 1)];
                    x_pack = packs[nji_pack_index(1, k + 1)];
                }
#pragma unroll
                for (int i = 0; i < NJI_VEC; i++) {
                    if (NJI_HAS_GAMMA) g[i] *= gamma[k];
                    // Differences first: exactly 0 where the terms agree, as with one column.
                    g[i] = rstd[i] * (g[i] - sum_g[i] - (x[i] - mean[i]) * sum_gx[i]);
                }
                const bool is_mine = here.is_here && nji_is_column(lane, k);
                if ((NJI_ACCUMULATE & 1) && is_mine) {
                    nji_real old[NJI_VEC];
                    out.load(to);
                    out.widen(old);
#pragma unroll
                    for (int i = 0; i < NJI_VEC; i++) g[i] += old[i];
                }
                out.narrow(g);
                if (is_mine) out.store(to);
                to += nji_chunk_stride(p, p.dx);
                nji_refill_chunk(p, lane, fetcher, k);
            }
        } else {
#pragma unroll
            for (int k = 0; k < NJI_CHUNKS; k++) nji_refill_chunk(p, lane, fetcher, k);
        }
        nji_refill_end(p, lane, next, slot);
        nji_next_tile(walk);
        nji_next_tile(ahead);
        slot = nji_next_slot(slot);
    }
    if (NJI_WANT_DGAMMA) nji_write_part(p, lane, dgamma, 0);
    if (NJI_WANT_DBETA) nji_write_part(p, lane, dbeta, 1);
}

#endif
