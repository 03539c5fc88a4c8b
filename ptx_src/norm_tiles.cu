// Channels first: neighbouring rows lie next to each other, columns are strided (NCHW, axis 1).
//
// Mapping. A tile is NJI_ROW_LANES * NJI_VEC neighbouring rows by all columns; a block keeps it in
// registers, so x and dy are read from memory once. A thread takes NJI_VEC neighbouring rows in one
// access and NJI_CHUNKS columns, NJI_COL_LANES apart; row lanes are the fastest index. Tiles run
// along the last row dim and end with it; blocks walk over tiles with a stride of the grid. rows >=
// 1, one col dim. No atomics; the order of every sum is fixed. Offsets are 64-bit.
//
// The build defines, beside the types: NJI_COLS, NJI_VEC, NJI_ROW_LANES, NJI_COL_LANES, NJI_CHUNKS,
// NJI_BLOCKS (per multiprocessor, at least), NJI_P (parameter type), NJI_FORWARD (0 or 1),
// NJI_HAS_GAMMA, NJI_HAS_BETA, NJI_GRADS, NJI_ACCUMULATE.

#define NJI_THREADS (NJI_ROW_LANES * NJI_COL_LANES)
#define NJI_WARPS (NJI_THREADS / 32)
#define NJI_TILE (NJI_ROW_LANES * NJI_VEC) // rows of a tile

// A warp holds 32 / NJI_ROW_LANES columns: its lanes halve their 2 * NJI_VEC values that many
// times.
#define NJI_HALVINGS (NJI_ROW_LANES == 32 ? 0 : NJI_ROW_LANES == 16 ? 1 : NJI_ROW_LANES == 8 ? 2 : \
                      NJI_ROW_LANES == 4 ? 3 : NJI_ROW_LANES == 2 ? 4 : 5)
#define NJI_HELD ((2 * NJI_VEC >> NJI_HALVINGS) > 0 ? 2 * NJI_VEC >> NJI_HALVINGS : 1)

#define NJI_KERNEL extern "C" __global__ void __launch_bounds__(NJI_THREADS, NJI_BLOCKS)

typedef nji_pack<NJI_X, NJI_VEC> nji_pack_x;

// A thread's rows and columns. `rows` of its NJI_VEC rows exist.
struct nji_place {
    int row_lane, col_lane;
    int rows;
    nji_i64 row; // its first
};

NJI_INLINE nji_i64 nji_inner(const nji_problem &p) {
    return p.extent[p.row_dims - 1];
}

NJI_INLINE nji_i64 nji_tiles_in_run(const nji_problem &p) {
    return (nji_inner(p) + NJI_TILE - 1) / NJI_TILE;
}

NJI_INLINE nji_i64 nji_tile_count(const nji_problem &p) {
    return p.rows / nji_inner(p) * nji_tiles_in_run(p);
}

NJI_INLINE nji_place nji_my_place(const nji_problem &p, nji_i64 tile) {
    nji_place place;
    const nji_i64 run = tile / nji_tiles_in_run(p);
    nji_i64 in_run;
    place.row_lane = threadIdx.x % NJI_ROW_LANES;
    place.col_lane = threadIdx.x / NJI_ROW_LANES;
    in_run = (tile - run * nji_tiles_in_run(p)) * NJI_TILE + place.row_lane * NJI_VEC;
    place.rows = nji_inner(p) - in_run >= NJI_VEC ? NJI_VEC : 0; // the run is a multiple of NJI_VEC
    place.row = run * nji_inner(p) + (place.rows ? in_run : 0);
    return place;
}

NJI_INLINE int nji_column(const nji_place &place, int chunk) {
    return chunk * NJI_COL_LANES + place.col_lane;
}

// Folds to true where the threads cover the columns exactly.
NJI_INLINE bool nji_is_column(int column) {
    return NJI_CHUNKS * NJI_COL_LANES == NJI_COLS || column < NJI_COLS;
}

NJI_INLINE nji_i64 nji_col_stride(const nji_problem &p, const nji_operand &operand) {
    return operand.stride[p.row_dims];
}

NJI_INLINE void nji_load_tile(const nji_problem &p, const nji_operand &operand, nji_i64 at,
                              const nji_place &place, nji_pack_x out[NJI_CHUNKS]) {
    const NJI_X *from = (const NJI_X *)operand.data + at;
    const nji_i64 stride = nji_col_stride(p, operand);
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) {
        const int column = nji_column(place, k);
        if (place.rows && nji_is_column(column)) out[k].load(from + column * stride);
        else out[k].zero();
    }
}

NJI_INLINE nji_real nji_load_param(const nji_problem &p, const nji_operand &operand, int column) {
    return nji_widen(((const NJI_P *)operand.data)[column * nji_col_stride(p, operand)]);
}

// Both sums over the columns, for each of the thread's rows; all threads of a row get the result.
// Within a warp lanes trade halves of what they hold, so that each step moves half as much.
NJI_INLINE void nji_tile_sums(const nji_place &place, nji_real a[NJI_VEC], nji_real b[NJI_VEC]) {
    __shared__ nji_real stage[NJI_WARPS][2 * NJI_TILE];
    __shared__ nji_real total[2 * NJI_TILE];
    nji_real held[2 * NJI_VEC];
    int first = 0;        // held[i] stands for value first + i of the 2 * NJI_VEC
    bool is_copy = false; // another lane holds the same
#pragma unroll
    for (int i = 0; i < NJI_VEC; i++) {
        held[i] = a[i];
        held[NJI_VEC + i] = b[i];
    }
    // Bounds are constant, so that held stays in registers.
#pragma unroll
    for (int step = 1; step <= NJI_HALVINGS; step++) {
        const int distance = 32 >> step, count = 2 * NJI_VEC >> step;
        const bool upper = (threadIdx.x & distance) != 0;
        if (count == 0) {
            held[0] += nji_swap(held[0], distance);
            is_copy |= upper;
        }
#pragma unroll
        for (int i = 0; i < NJI_VEC; i++) {
            if (i >= count) continue;
            const nji_real sent = upper ? held[i] : held[i + count];
            held[i] = (upper ? held[i + count] : held[i]) + nji_swap(sent, distance);
        }
        first += upper ? count : 0;
    }
#pragma unroll
    for (int i = 0; i < NJI_HELD; i++) {
        const int value = first + i, which = value / NJI_VEC;
        const int row = place.row_lane * NJI_VEC + value % NJI_VEC;
        if (!is_copy) stage[threadIdx.x / 32][which * NJI_TILE + row] = held[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * NJI_TILE; i += NJI_THREADS) {
        nji_real sum = 0;
#pragma unroll
        for (int warp = 0; warp < NJI_WARPS; warp++) sum += stage[warp][i];
        total[i] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < NJI_VEC; i++) {
        a[i] = total[place.row_lane * NJI_VEC + i];
        b[i] = total[NJI_TILE + place.row_lane * NJI_VEC + i];
    }
}

#if NJI_FORWARD

// y, mean, rstd. y may be x.
NJI_KERNEL nj_tiles_forward(NJI_PARAMETER p) {
    nji_begin();
    for (nji_i64 tile = blockIdx.x; tile < nji_tile_count(p); tile += gridDim.x) {
        const nji_place place = nji_my_place(p, tile);
        const nji_offsets at = nji_row_offsets(p, p.y, place.row);
        const nji_real count = NJI_COLS;
        nji_real sum[NJI_VEC], unused[NJI_VEC], first[NJI_VEC], second[NJI_VEC], center[NJI_VEC];
        nji_real rstd[NJI_VEC];
        nji_pack_x x[NJI_CHUNKS];
        nji_load_tile(p, p.x, at.x, place, x);
#pragma unroll
        for (int i = 0; i < NJI_VEC; i++) sum[i] = unused[i] = first[i] = second[i] = 0;
#pragma unroll
        for (int k = 0; k < NJI_CHUNKS; k++) {
            nji_real value[NJI_VEC];
            x[k].widen(value);
#pragma unroll
            for (int i = 0; i < NJI_VEC; i++) sum[i] += value[i];
        }
        nji_tile_sums(place, sum, unused);
        // Two passes: one pass cancels when |mean| >> std. The shift is what rounding took from
        // center.
#pragma unroll
        for (int i = 0; i < NJI_VEC; i++) center[i] = sum[i] / count;
#pragma unroll
        for (int k = 0; k < NJI_CHUNKS; k++) {
            nji_real value[NJI_VEC];
            x[k].widen(value);
            if (!nji_is_column(nji_column(place, k))) continue;
#pragma unroll
            for (int i = 0; i < NJI_VEC; i++) {
                const nji_real d = value[i] - center[i];
                first[i] += d;
                second[i] += d * d;
            }
        }
        nji_tile_sums(place, first, second);
#pragma unroll
        for (int i = 0; i < NJI_VEC; i++) {
            const nji_real shift = nji_shift_of(first[i] / count);
            nji_real variance = (second[i] - first[i] * shift) / count;
            if (variance < 0) variance = 0; // by rounding; NaN stays
            rstd[i] = nji_rsqrt(variance + (nji_real)p.eps);
            first[i] = shift;
        }
        if (!place.rows) continue;
        NJI_X *to = (NJI_X *)p.y.data + at.out;
#pragma unroll
        for (int k = 0; k < NJI_CHUNKS; k++) {
            const int column = nji_column(place, k);
            nji_real value[NJI_VEC], gamma = 1, beta = 0;
            nji_pack_x out;
            if (!nji_is_column(column)) continue;
            x[k].widen(value);
            if (NJI_HAS_GAMMA) gamma = nji_load_param(p, p.gamma, column);
            if (NJI_HAS_BETA) beta = nji_load_param(p, p.beta, column);
#pragma unroll
            for (int i = 0; i < NJI_VEC; i++) {
                value[i] = ((value[i] - center[i]) - first[i]) * rstd[i];
                if (NJI_HAS_GAMMA) value[i] *= gamma;
                if (NJI_HAS_BETA) value[i] += beta;
            }
            out.narrow(value);
            out.store(to + column * nji_col_stride(p, p.y));
        }
        if (place.col_lane == 0) {
#pragma unroll
            for (int i = 0; i < NJI_VEC; i++) {
                nji_offsets stat = at;
                stat.mean += i * p.mean.stride[p.row_dims - 1];
                stat.rstd += i * p.rstd.stride[p.row_dims - 1];
                nji_write_stats(p, stat, center[i] + first[i], rstd[i]);
            }
        }
    }
}

#else

#define NJI_WANT_DX ((NJI_GRADS & 1) != 0)
#define NJI_WANT_DGAMMA ((NJI_GRADS & 2) != 0)
#define NJI_WANT_DBETA ((NJI_GRADS & 4) != 0)
#define NJI_WANT_X (NJI_WANT_DX || NJI_WANT_DGAMMA)

// A parameter gradient of a column, summed over the row lanes, to the block's part of the
// workspace.
NJI_INLINE void nji_write_part(const nji_problem &p, const nji_place &place,
                               nji_real gradient[NJI_CHUNKS], int which) {
    nji_real *to = (nji_real *)p.partial + ((nji_i64)blockIdx.x * 2 + which) * NJI_COLS;
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) {
        const int column = nji_column(place, k);
        const nji_real sum = nji_lanes_sum<NJI_ROW_LANES>(gradient[k]);
        if (place.row_lane == 0 && nji_is_column(column)) to[column] = sum;
    }
}

// dx and one part of the parameter gradients for each block. dx may be x or dy.
NJI_KERNEL nj_tiles_backward(NJI_PARAMETER p) {
    nji_real gamma[NJI_CHUNKS], dgamma[NJI_CHUNKS], dbeta[NJI_CHUNKS];
    nji_begin();
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) {
        const int column = k * NJI_COL_LANES + (int)threadIdx.x / NJI_ROW_LANES;
        dgamma[k] = dbeta[k] = 0;
        gamma[k] = 1;
        if (NJI_HAS_GAMMA && NJI_WANT_DX && nji_is_column(column)) {
            gamma[k] = nji_load_param(p, p.gamma, column);
        }
    }
    for (nji_i64 tile = blockIdx.x; tile < nji_tile_count(p); tile += gridDim.x) {
        const nji_place place = nji_my_place(p, tile);
        const nji_offsets at = nji_row_offsets(p, p.dx, place.row);
        nji_real mean[NJI_VEC], rstd[NJI_VEC], sum_g[NJI_VEC], sum_gx[NJI_VEC];
        nji_pack_x x[NJI_CHUNKS], dy[NJI_CHUNKS];
        nji_load_tile(p, p.dy, at.dy, place, dy);
        if (NJI_WANT_X) nji_load_tile(p, p.x, at.x, place, x);
#pragma unroll
        for (int i = 0; i < NJI_VEC; i++) {
            sum_g[i] = sum_gx[i] = mean[i] = rstd[i] = 0;
            if (NJI_WANT_X && place.rows) {
                const nji_i64 mean_at = at.mean + i * p.mean.stride[p.row_dims - 1];
                const nji_i64 rstd_at = at.rstd + i * p.rstd.stride[p.row_dims - 1];
                mean[i] = nji_load_any(p.mean.data, mean_at, NJI_STAT_CODE);
                rstd[i] = nji_load_any(p.rstd.data, rstd_at, NJI_STAT_CODE);
            }
        }
#pragma unroll
        for (int k = 0; k < NJI_CHUNKS; k++) {
            nji_real xhat[NJI_VEC], g[NJI_VEC];
            if (!nji_is_column(nji_column(place, k))) continue;
            dy[k].widen(g);
            if (NJI_WANT_X) x[k].widen(xhat);
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
        if (!NJI_WANT_DX) continue;
        nji_tile_sums(place, sum_g, sum_gx);
        if (!place.rows) continue;
#pragma unroll
        for (int i = 0; i < NJI_VEC; i++) {
            sum_g[i] /= (nji_real)NJI_COLS;
            sum_gx[i] /= (nji_real)NJI_COLS;
        }
        NJI_X *to = (NJI_X *)p.dx.data + at.out;
#pragma unroll
        for (int k = 0; k < NJI_CHUNKS; k++) {
            const int column = nji_column(place, k);
            nji_real xhat[NJI_VEC], g[NJI_VEC];
            nji_pack_x out;
            if (!nji_is_column(column)) continue;
            dy[k].widen(g);
            x[k].widen(xhat);
#pragma unroll
            for (int i = 0; i < NJI_VEC; i++) {
                xhat[i] = (xhat[i] - mean[i]) * rstd[i];
                if (NJI_HAS_GAMMA) g[i] *= gamma[k];
                // Differences first: exactly 0 where the terms agree, as with one column.
                g[i] = rstd[i] * (g[i] - sum_g[i] - xhat[i] * sum_gx[i]);
            }
            if (NJI_ACCUMULATE & 1) {
                nji_real old[NJI_VEC];
                out.load(to + column * nji_col_stride(p, p.dx));
                out.widen(old);
#pragma unroll
                for (int i = 0; i < NJI_VEC; i++) g[i] += old[i];
            }
            out.narrow(g);
            out.store(to + column * nji_col_stride(p, p.dx));
        }
    }
    const nji_place place = nji_my_place(p, blockIdx.x);
    if (NJI_WANT_DGAMMA) nji_write_part(p, place, dgamma, 0);
    if (NJI_WANT_DBETA) nji_write_part(p, place, dbeta, 1);
}

#endif
