// Rows of unit-stride columns, kept in registers between the sums and the result: x and dy are read
// from memory once. Built with NJI_LOOSE, columns of any stride, one for each operand.
//
// Mapping. A row is cut in NJI_SLICES slices, a block works on one slice; within it NJI_LANES
// threads share a row, each with NJI_CHUNKS packs of NJI_VEC columns, a lane apart. Up to 32 lanes
// lie within a warp, and a block works on several rows; more lanes are the whole block and one row.
// Slices meet in a cluster (NJI_CLUSTER), or through the workspace in a second kernel (split
// kernels). Blocks walk over rows with a stride of the grid; with NJI_PREFETCH they load the next
// row while they work on one. No atomics; the order of every sum is fixed. Offsets are 64-bit.
//
// The build defines, beside the types: NJI_COLS, NJI_VEC, NJI_LANES, NJI_CHUNKS, NJI_THREADS,
// NJI_SLICES, NJI_CLUSTER (0 or 1), NJI_BLOCKS (per multiprocessor, at least), NJI_P (parameter
// type), NJI_DEPTH (forward: rows that a thread loads at once), NJI_PREFETCH (0 or 1), NJI_AHEAD
// (rows that the L2 cache is asked for in advance), NJI_LOOSE (0 or 1; with 1 NJI_VEC and NJI_DEPTH
// are 1), NJI_FORWARD (0 or 1), NJI_HAS_GAMMA, NJI_HAS_BETA, NJI_GRADS, NJI_ACCUMULATE.

#define NJI_ROWS (NJI_THREADS / NJI_LANES) // rows that a block works on side by side
#define NJI_WARPS ((NJI_LANES + 31) / 32)  // warps that share a row
#define NJI_WIDTH (NJI_LANES * NJI_CHUNKS * NJI_VEC) // columns of a slice
#define NJI_PEERS (NJI_CLUSTER ? NJI_SLICES : 1)

#if NJI_CLUSTER
#define NJI_KERNEL extern "C" __global__ void __cluster_dims__(NJI_SLICES, 1, 1) \
    __launch_bounds__(NJI_THREADS, NJI_BLOCKS)
#else
#define NJI_KERNEL extern "C" __global__ void __launch_bounds__(NJI_THREADS, NJI_BLOCKS)
#endif

#if NJI_LOOSE // kernels of another name
#define nj_rows_forward nj_loose_rows_forward
#define nj_rows_backward nj_loose_rows_backward
#define nj_split_forward_sums nj_loose_split_forward_sums
#define nj_split_forward_write nj_loose_split_forward_write
#define nj_split_backward_sums nj_loose_split_backward_sums
#define nj_split_backward_write nj_loose_split_backward_write
#endif

typedef nji_pack<NJI_X, NJI_VEC> nji_pack_x;
typedef nji_pack<NJI_P, NJI_VEC> nji_pack_p;

// Where a thread works.
struct nji_place {
    int lane, group; // within the row; which of the block's rows
    int slice;
    nji_i64 first, step; // first row of the block and distance to its next
};

NJI_INLINE nji_place nji_my_place() {
    nji_place place;
    place.lane = threadIdx.x % NJI_LANES;
    place.group = threadIdx.x / NJI_LANES;
    place.slice = blockIdx.x % NJI_SLICES;
    place.first = (nji_i64)(blockIdx.x / NJI_SLICES) * NJI_ROWS * NJI_DEPTH;
    place.step = (nji_i64)(gridDim.x / NJI_SLICES) * NJI_ROWS * NJI_DEPTH;
    return place;
}

NJI_INLINE int nji_column(const nji_place &place, int chunk) {
    return ((place.slice * NJI_CHUNKS + chunk) * NJI_LANES + place.lane) * NJI_VEC;
}

// Folds to true where the packs cover the columns exactly.
NJI_INLINE bool nji_is_column(int column) {
    return NJI_WIDTH * NJI_SLICES == NJI_COLS || column < NJI_COLS;
}

// Elements from one column to the next. A single column has no dim of its own.
NJI_INLINE nji_i64 nji_step(const nji_problem &p, const nji_operand &operand) {
    return NJI_LOOSE && p.col_dims > 0 ? operand.stride[p.row_dims] : 1;
}

// Goes over a thread's packs of a row that begins at `first`. Unit strides have constant distances;
// others are added up, since a product for each pack would take registers.
template <typename T> struct nji_walk {
    T *at;
    nji_i64 step; // from pack to pack

    __device__ __forceinline__ nji_walk(T *first, nji_i64 step, const nji_place &place)
        : at(NJI_LOOSE ? first + nji_column(place, 0) * step : first),
          step(NJI_LANES * NJI_VEC * step) {}
    __device__ __forceinline__ T *pack(int column) const { return NJI_LOOSE ? at : at + column; }
    __device__ __forceinline__ void next() {
        if (NJI_LOOSE) at += step;
    }
};

NJI_INLINE void nji_load_params(const nji_problem &p, const nji_operand &operand,
                                const nji_place &place, nji_real out[NJI_CHUNKS][NJI_VEC]) {
    nji_walk<const NJI_P> from((const NJI_P *)operand.data, nji_step(p, operand), place);
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++, from.next()) {
        nji_pack_p pack;
        const int column = nji_column(place, k);
        pack.zero();
        if (nji_is_column(column)) pack.load(from.pack(column));
        pack.widen(out[k]);
    }
}

NJI_INLINE void nji_load_columns(const NJI_X *first, nji_i64 step, const nji_place &place,
                                 nji_pack_x out[NJI_CHUNKS]) {
    nji_walk<const NJI_X> from(first, step, place);
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++, from.next()) {
        const int column = nji_column(place, k);
        if (nji_is_column(column)) out[k].load(from.pack(column));
        else out[k].zero();
    }
}

// Unit stride has code of its own: its distances are constants.
NJI_INLINE void nji_load_row(const nji_problem &p, const nji_operand &operand, nji_i64 at,
                             const nji_place &place, nji_pack_x out[NJI_CHUNKS]) {
    const NJI_X *first = (const NJI_X *)operand.data + at;
    const nji_i64 step = nji_step(p, operand);
    if (step == 1) nji_load_columns(first, 1, place, out);
    else nji_load_columns(first, step, place, out);
}

NJI_INLINE void nji_zero_row(nji_pack_x out[NJI_CHUNKS]) {
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) out[k].zero();
}

// ---- sums over a row ----------------------------------------------------------------------------

// Both sums over the slice's or, in a cluster, the row's threads; equal bits in all of them. `turn`
// flips from call to call: it picks the half of the exchange that slower threads no longer read.
NJI_INLINE void nji_row_sums(nji_real &a, nji_real &b, int &turn) {
#if NJI_LANES == 1
    (void)turn;
#elif NJI_LANES <= 32 && !NJI_CLUSTER
    const nji_real mine = nji_lanes_sum_split<NJI_LANES>(a, b);
    const nji_real other = nji_swap(mine, NJI_LANES / 2);
    const bool upper = (threadIdx.x & (NJI_LANES / 2)) != 0;
    a = upper ? other : mine;
    b = upper ? mine : other;
    (void)turn;
#else
    __shared__ __align__(16) nji_real exchange[2][NJI_PEERS * NJI_WARPS][2];
    const int warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    const nji_real sum = nji_lanes_sum_split<32>(a, b);
#if NJI_CLUSTER
    const int rank = blockIdx.x % NJI_SLICES;
    if (thread % 16 < NJI_SLICES) {
        nji_cluster_store(&exchange[turn][rank * NJI_WARPS + warp][thread / 16], thread % 16, sum);
    }
    nji_cluster_sync();
#else
    if (thread % 16 == 0) exchange[turn][warp][thread / 16] = sum;
    __syncthreads();
#endif
    a = b = 0;
    if (NJI_PEERS * NJI_WARPS <= 8) {
#pragma unroll
        for (int i = 0; i < NJI_PEERS * NJI_WARPS; i++) {
            a += exchange[turn][i][0];
            b += exchange[turn][i][1];
        }
    } else {
#pragma unroll
        for (int i = thread; i < NJI_PEERS * NJI_WARPS; i += 32) {
            a += exchange[turn][i][0];
            b += exchange[turn][i][1];
        }
        const nji_real mine = nji_lanes_sum_split<32>(a, b);
        const nji_real other = nji_swap(mine, 16);
        a = thread < 16 ? mine : other;
        b = thread < 16 ? other : mine;
    }
    turn ^= 1;
#endif
}

// A block's shared memory may be written by its peers only between its start and its end: all
// blocks of a cluster meet at both.
NJI_INLINE void nji_meet() {
#if NJI_CLUSTER
    nji_cluster_sync();
#endif
}

#if NJI_FORWARD
// ---- forward ------------------------------------------------------------------------------------

// Count of the columns in this block's slice.
NJI_INLINE nji_real nji_slice_cols(int slice) {
    const int left = NJI_COLS - slice * NJI_WIDTH;
    return (nji_real)(left < NJI_WIDTH ? left : NJI_WIDTH);
}

// Mean and sum of squared deviations of `count` columns. Two passes over registers: one pass
// cancels when |mean| >> std. The mean comes as center + shift: center is the sum's rounded mean,
// shift what rounding lost.
NJI_INLINE void nji_moments(const nji_place &place, const nji_pack_x x[NJI_CHUNKS], nji_real count,
                            nji_real &center, nji_real &shift, nji_real &squares, int &turn) {
    nji_real sums[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) {
        nji_real value[NJI_VEC];
        x[k].widen(value);
#pragma unroll
        for (int i = 0; i < NJI_VEC; i++) sums[i % 2] += value[i];
    }
    nji_real sum = sums[0] + sums[1];
#if NJI_LANES <= 32 && !NJI_CLUSTER
    sum = nji_lanes_sum<NJI_LANES>(sum);
#else
    nji_real unused = 0;
    nji_row_sums(sum, unused, turn);
#endif
    center = sum / count;
    nji_real first = 0, second = 0;
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) {
        nji_real value[NJI_VEC];
        x[k].widen(value);
        if (!nji_is_column(nji_column(place, k))) continue;
#pragma unroll
        for (int i = 0; i < NJI_VEC; i++) {
            const nji_real d = value[i] - center;
            first += d;
            second += d * d;
        }
    }
    nji_row_sums(first, second, turn);
    shift = nji_shift_of(first / count);
    squares = second - first * shift;
}

// A row that is worked on.
struct nji_row {
    nji_pack_x x[NJI_CHUNKS];
    nji_real center, shift, rstd;
    nji_i64 out; // offset in y
    bool is_row; // else past the last
};

// gamma and beta are read and widened once for all rows.
NJI_INLINE void nji_write_y(const nji_problem &p, const nji_place &place,
                            const nji_row rows[NJI_DEPTH]) {
    nji_walk<NJI_X> to((NJI_X *)p.y.data + rows[0].out, nji_step(p, p.y), place);
    nji_walk<const NJI_P> gamma_at((const NJI_P *)p.gamma.data, nji_step(p, p.gamma), place);
    nji_walk<const NJI_P> beta_at((const NJI_P *)p.beta.data, nji_step(p, p.beta), place);
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++, to.next(), gamma_at.next(), beta_at.next()) {
        const int column = nji_column(place, k);
        nji_real gamma[NJI_VEC], beta[NJI_VEC];
        nji_pack_p param;
        if (!nji_is_column(column)) continue;
        if (NJI_HAS_GAMMA) {
            param.load(gamma_at.pack(column));
            param.widen(gamma);
        }
        if (NJI_HAS_BETA) {
            param.load(beta_at.pack(column));
            param.widen(beta);
        }
#pragma unroll
        for (int r = 0; r < NJI_DEPTH; r++) {
            const nji_row &row = rows[r];
            nji_real value[NJI_VEC];
            nji_pack_x out;
            row.x[k].widen(value);
#pragma unroll
            for (int i = 0; i < NJI_VEC; i++) {
                value[i] = ((value[i] - row.center) - row.shift) * row.rstd;
                if (NJI_HAS_GAMMA) value[i] *= gamma[i];
                if (NJI_HAS_BETA) value[i] += beta[i];
            }
            out.narrow(value);
            if (row.is_row) out.store(to.pack(column) + (row.out - rows[0].out));
        }
    }
}

#if NJI_SLICES == 1 || NJI_CLUSTER

// y, mean, rstd. NJI_DEPTH rows for each NJI_LANES threads of each cluster, all loaded before the
// first is summed; rows >= 1; y may be x.
NJI_KERNEL nj_rows_forward(NJI_PARAMETER p) {
    nji_begin();
    const nji_place place = nji_my_place();
    int turn = 0;
    nji_meet();
    for (nji_i64 base = place.first; base < p.rows; base += place.step) {
        nji_row rows[NJI_DEPTH];
#pragma unroll
        for (int r = 0; r < NJI_DEPTH; r++) {
            nji_row &row = rows[r];
            const nji_i64 index = base + r * NJI_ROWS + place.group;
            row.is_row = (NJI_ROWS == 1 && NJI_DEPTH == 1) || index < p.rows;
            // A group past the last row adds nothing, and keeps off a row that another may
            // overwrite.
            nji_zero_row(row.x);
            row.out = 0;
            if (!row.is_row) continue;
            const nji_offsets at = nji_row_offsets(p, p.y, index);
            nji_load_row(p, p.x, at.x, place, row.x);
            row.out = at.out;
        }
#pragma unroll
        for (int r = 0; r < NJI_DEPTH; r++) {
            nji_row &row = rows[r];
            nji_real squares;
            nji_moments(place, row.x, NJI_COLS, row.center, row.shift, squares, turn);
            row.rstd = nji_rstd_of(squares, NJI_COLS, (nji_real)p.eps);
        }
        nji_write_y(p, place, rows);
        if (place.lane != 0 || place.slice != 0) continue;
#pragma unroll
        for (int r = 0; r < NJI_DEPTH; r++) {
            const nji_row &row = rows[r];
            if (!row.is_row) continue;
            nji_write_stats(p, nji_row_offsets(p, p.y, base + r * NJI_ROWS + place.group),
                            row.center + row.shift, row.rstd);
        }
    }
    nji_meet();
}

#else

// First of two: mean and sum of squared deviations of each slice of each row, to the workspace.
NJI_KERNEL nj_split_forward_sums(NJI_PARAMETER p) {
    nji_begin();
    const nji_place place = nji_my_place();
    nji_real *sums = (nji_real *)p.sums;
    int turn = 0;
    for (nji_i64 row = place.first; row < p.rows; row += place.step) {
        nji_pack_x x[NJI_CHUNKS];
        nji_real center, shift, squares;
        nji_load_row(p, p.x, nji_row_offsets(p, p.y, row).x, place, x);
        nji_moments(place, x, nji_slice_cols(place.slice), center, shift, squares, turn);
        if (place.lane == 0) {
            sums[(row * NJI_SLICES + place.slice) * 2] = center + shift;
            sums[(row * NJI_SLICES + place.slice) * 2 + 1] = squares;
        }
    }
}

// Second of two: the slices' moments are joined (Chan, Golub, LeVeque 1983) in order, by every
// thread; then y.
NJI_KERNEL nj_split_forward_write(NJI_PARAMETER p) {
    nji_begin();
    const nji_place place = nji_my_place();
    for (nji_i64 row = place.first; row < p.rows; row += place.step) {
        const nji_real *sums = (const nji_real *)p.sums + row * NJI_SLICES * 2;
        const nji_offsets at = nji_row_offsets(p, p.y, row);
        nji_row it;
        nji_real squares = 0;
        it.center = sums[0];
        it.shift = 0;
        it.out = at.out;
        it.is_row = true;
        nji_load_row(p, p.x, at.x, place, it.x);
        for (int s = 0; s < NJI_SLICES; s++) {
            it.shift += nji_slice_cols(s) * (sums[2 * s] - it.center);
        }
        it.shift = nji_shift_of(it.shift / (nji_real)NJI_COLS);
        for (int s = 0; s < NJI_SLICES; s++) {
            const nji_real d = (sums[2 * s] - it.center) - it.shift;
            squares += sums[2 * s + 1] + nji_slice_cols(s) * d * d;
        }
        it.rstd = nji_rstd_of(squares, NJI_COLS, (nji_real)p.eps);
        nji_write_y(p, place, &it);
        if (place.lane == 0 && place.slice == 0) {
            nji_write_stats(p, at, it.center + it.shift, it.rstd);
        }
    }
}

#endif

#else
// ---- backward -----------------------------------------------------------------------------------

#define NJI_WANT_DX ((NJI_GRADS & 1) != 0)
#define NJI_WANT_DGAMMA ((NJI_GRADS & 2) != 0)
#define NJI_WANT_DBETA ((NJI_GRADS & 4) != 0)
#define NJI_WANT_X (NJI_WANT_DX || NJI_WANT_DGAMMA)

struct nji_row {
    nji_pack_x x[NJI_CHUNKS], dy[NJI_CHUNKS];
    nji_real mean, rstd;
    nji_i64 out; // offset in dx
};

// A row past the end is all zeros: it adds nothing.
NJI_INLINE void nji_load(const nji_problem &p, const nji_place &place, nji_i64 row, nji_row &out) {
    if (row < p.rows) {
        const nji_offsets at = nji_row_offsets(p, p.dx, row);
        out.out = at.out;
        nji_load_row(p, p.dy, at.dy, place, out.dy);
        if (NJI_WANT_X) {
            nji_load_row(p, p.x, at.x, place, out.x);
            out.mean = nji_load_any(p.mean.data, at.mean, NJI_STAT_CODE);
            out.rstd = nji_load_any(p.rstd.data, at.rstd, NJI_STAT_CODE);
        }
    } else {
#pragma unroll
        for (int k = 0; k < NJI_CHUNKS; k++) {
            out.x[k].zero();
            out.dy[k].zero();
        }
        out.mean = out.rstd = 0;
        out.out = 0;
    }
}

// Asks the L2 cache for this block's piece of a row, where it is one piece.
NJI_INLINE void nji_fetch_row(const nji_problem &p, const nji_operand &operand, nji_i64 at,
                              int first, int count) {
    if (nji_step(p, operand) != 1) return;
    nji_fetch((const NJI_X *)operand.data + at + first, count * (int)sizeof(NJI_X));
}

// Asks the L2 cache for the slice of a row that is worked on some steps later.
NJI_INLINE void nji_fetch_ahead(const nji_problem &p, const nji_place &place, nji_i64 row) {
    if (NJI_AHEAD == 0 || place.lane != 0) return;
    row += NJI_AHEAD * place.step;
    if (row >= p.rows) return;
    const nji_offsets at = nji_row_offsets(p, p.dx, row);
    const int first = place.slice * NJI_WIDTH;
    const int count = NJI_COLS - first < NJI_WIDTH ? NJI_COLS - first : NJI_WIDTH;
    nji_fetch_row(p, p.dy, at.dy, first, count);
    if (NJI_WANT_X) nji_fetch_row(p, p.x, at.x, first, count);
}

struct nji_gradients {
    nji_real gamma[NJI_CHUNKS][NJI_VEC], beta[NJI_CHUNKS][NJI_VEC];
};

// xhat and g of a pack.
NJI_INLINE void nji_terms(const nji_row &row, int k, const nji_real gamma[NJI_VEC],
                          nji_real xhat[NJI_VEC], nji_real dy[NJI_VEC], nji_real g[NJI_VEC]) {
    row.dy[k].widen(dy);
    if (NJI_WANT_X) row.x[k].widen(xhat);
#pragma unroll
    for (int i = 0; i < NJI_VEC; i++) {
        if (NJI_WANT_X) xhat[i] = (xhat[i] - row.mean) * row.rstd;
        g[i] = NJI_HAS_GAMMA && NJI_WANT_DX ? dy[i] * gamma[i] : dy[i];
    }
}

// Adds the row to the parameter gradients; sum_g and sum_gx over this thread's columns.
NJI_INLINE void nji_add_row(const nji_place &place, const nji_row &row,
                            const nji_real gamma[NJI_CHUNKS][NJI_VEC], nji_gradients &gradients,
                            nji_real &sum_g, nji_real &sum_gx) {
    sum_g = sum_gx = 0;
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) {
        nji_real xhat[NJI_VEC], dy[NJI_VEC], g[NJI_VEC];
        if (!nji_is_column(nji_column(place, k))) continue;
        nji_terms(row, k, gamma[k], xhat, dy, g);
#pragma unroll
        for (int i = 0; i < NJI_VEC; i++) {
            if (NJI_WANT_DX) {
                sum_g += g[i];
                sum_gx += g[i] * xhat[i];
            }
            if (NJI_WANT_DGAMMA) gradients.gamma[k][i] += dy[i] * xhat[i];
            if (NJI_WANT_DBETA) gradients.beta[k][i] += dy[i];
        }
    }
}

// dx = rstd*(g - sum_g/cols - xhat*sum_gx/cols). The differences come before the product: they are
// exactly 0 where the terms agree, as with one column.
NJI_INLINE void nji_write_dx(const nji_problem &p, const nji_place &place, const nji_row &row,
                             const nji_real gamma[NJI_CHUNKS][NJI_VEC],
                             nji_real sum_g, nji_real sum_gx) {
    const nji_real mean_g = sum_g / (nji_real)NJI_COLS, mean_gx = sum_gx / (nji_real)NJI_COLS;
    nji_walk<NJI_X> to((NJI_X *)p.dx.data + row.out, nji_step(p, p.dx), place);
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++, to.next()) {
        const int column = nji_column(place, k);
        nji_real xhat[NJI_VEC], dy[NJI_VEC], g[NJI_VEC];
        nji_pack_x out;
        if (!nji_is_column(column)) continue;
        nji_terms(row, k, gamma[k], xhat, dy, g);
#pragma unroll
        for (int i = 0; i < NJI_VEC; i++) dy[i] = row.rstd * (g[i] - mean_g - xhat[i] * mean_gx);
        if (NJI_ACCUMULATE & 1) {
            nji_real old[NJI_VEC];
            out.load(to.pack(column));
            out.widen(old);
#pragma unroll
            for (int i = 0; i < NJI_VEC; i++) dy[i] += old[i];
        }
        out.narrow(dy);
        out.store(to.pack(column));
    }
}

// The block's rows are added, in a fixed order, and become one part of the workspace.
NJI_INLINE void nji_write_part(const nji_problem &p, const nji_place &place,
                               nji_real gradient[NJI_CHUNKS][NJI_VEC], int which) {
    const nji_i64 part = blockIdx.x / NJI_SLICES;
    nji_real *to = (nji_real *)p.partial + (part * 2 + which) * NJI_COLS;
#if NJI_ROWS > 1
    __shared__ nji_real total[NJI_WIDTH];
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) {
#pragma unroll
        for (int i = 0; i < NJI_VEC; i++) {
            for (int distance = NJI_LANES; distance < 32; distance *= 2) {
                gradient[k][i] += nji_swap(gradient[k][i], distance);
            }
        }
    }
    for (int warp = 0; warp < NJI_THREADS / 32; warp++) {
        __syncthreads();
        if (threadIdx.x / 32 != warp || threadIdx.x % 32 >= NJI_LANES) continue;
#pragma unroll
        for (int k = 0; k < NJI_CHUNKS; k++) {
            const int column = nji_column(place, k);
#pragma unroll
            for (int i = 0; i < NJI_VEC; i++) {
                if (warp > 0) gradient[k][i] += total[column + i];
                total[column + i] = gradient[k][i];
            }
        }
    }
    if (threadIdx.x / 32 != NJI_THREADS / 32 - 1 || threadIdx.x % 32 >= NJI_LANES) return;
#endif
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) {
        nji_pack<nji_real, NJI_VEC> out;
        const int column = nji_column(place, k);
        out.narrow(gradient[k]);
        if (nji_is_column(column)) out.store(to + column);
    }
}

NJI_INLINE void nji_write_parts(const nji_problem &p, const nji_place &place,
                                nji_gradients &gradients) {
    if (NJI_WANT_DGAMMA) nji_write_part(p, place, gradients.gamma, 0);
    if (NJI_WANT_DBETA) nji_write_part(p, place, gradients.beta, 1);
}

NJI_INLINE void nji_start(const nji_problem &p, const nji_place &place,
                          nji_real gamma[NJI_CHUNKS][NJI_VEC], nji_gradients &gradients) {
    if (NJI_HAS_GAMMA && NJI_WANT_DX) nji_load_params(p, p.gamma, place, gamma);
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) {
#pragma unroll
        for (int i = 0; i < NJI_VEC; i++) gradients.gamma[k][i] = gradients.beta[k][i] = 0;
    }
}

#if NJI_SLICES == 1 || NJI_CLUSTER

// dx and one part of the parameter gradients for each cluster; rows >= 1; dx may be x or dy.
NJI_KERNEL nj_rows_backward(NJI_PARAMETER p) {
    nji_begin();
    const nji_place place = nji_my_place();
    nji_real gamma[NJI_CHUNKS][NJI_VEC];
    nji_gradients gradients;
    nji_row next;
    int turn = 0;
    if (NJI_PREFETCH) nji_load(p, place, place.first + place.group, next);
    nji_start(p, place, gamma, gradients);
    nji_meet();
    for (nji_i64 base = place.first; base < p.rows; base += place.step) {
        const nji_i64 at = base + place.group;
        nji_real sum_g, sum_gx;
        nji_fetch_ahead(p, place, at);
        if (!NJI_PREFETCH) nji_load(p, place, at, next);
        const nji_row row = next;
        if (NJI_PREFETCH && base + place.step < p.rows) nji_load(p, place, at + place.step, next);
        nji_add_row(place, row, gamma, gradients, sum_g, sum_gx);
        if (NJI_WANT_DX) {
            nji_row_sums(sum_g, sum_gx, turn);
            if (at < p.rows) nji_write_dx(p, place, row, gamma, sum_g, sum_gx);
        }
    }
    nji_write_parts(p, place, gradients);
    nji_meet();
}

#else

// First of two: the sums of each slice of each row to the workspace, and the parts.
NJI_KERNEL nj_split_backward_sums(NJI_PARAMETER p) {
    nji_begin();
    const nji_place place = nji_my_place();
    nji_real gamma[NJI_CHUNKS][NJI_VEC];
    nji_real *sums = (nji_real *)p.sums;
    nji_gradients gradients;
    nji_row next;
    int turn = 0;
    if (NJI_PREFETCH) nji_load(p, place, place.first, next);
    nji_start(p, place, gamma, gradients);
    for (nji_i64 at = place.first; at < p.rows; at += place.step) {
        nji_real sum_g, sum_gx;
        nji_fetch_ahead(p, place, at);
        if (!NJI_PREFETCH) nji_load(p, place, at, next);
        const nji_row row = next;
        if (NJI_PREFETCH && at + place.step < p.rows) nji_load(p, place, at + place.step, next);
        nji_add_row(place, row, gamma, gradients, sum_g, sum_gx);
        if (NJI_WANT_DX) {
            nji_row_sums(sum_g, sum_gx, turn);
            if (place.lane == 0) {
                sums[(at * NJI_SLICES + place.slice) * 2] = sum_g;
                sums[(at * NJI_SLICES + place.slice) * 2 + 1] = sum_gx;
            }
        }
    }
    nji_write_parts(p, place, gradients);
}

// Second of two: dx. Every thread adds the slices' sums, in order.
NJI_KERNEL nj_split_backward_write(NJI_PARAMETER p) {
    nji_begin();
    const nji_place place = nji_my_place();
    nji_real gamma[NJI_CHUNKS][NJI_VEC];
    if (NJI_HAS_GAMMA) nji_load_params(p, p.gamma, place, gamma);
    for (nji_i64 at = place.first; at < p.rows; at += place.step) {
        const nji_real *sums = (const nji_real *)p.sums + at * NJI_SLICES * 2;
        nji_real sum_g = 0, sum_gx = 0;
        nji_row row;
        nji_load(p, place, at, row);
        for (int s = 0; s < NJI_SLICES; s++) {
            sum_g += sums[2 * s];
            sum_gx += sums[2 * s + 1];
        }
        nji_write_dx(p, place, row, gamma, sum_g, sum_gx);
    }
}

#endif
#endif
