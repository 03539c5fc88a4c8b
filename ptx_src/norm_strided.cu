// Rows and columns of any strides and any number of dims: what the other families do not take, and
// the fallback where nothing can be compiled.
//
// Mapping. Blocks of 256 threads work on p.row_lanes rows at a time, 256 / p.row_lanes threads to a
// row. With p.rows_fast neighbouring threads take neighbouring rows (channels first), else
// neighbouring columns: whichever lie closer in memory. rows, cols >= 0; x and dy are read again
// for each pass, mostly from cache. No atomics; the order of every sum is fixed. Offsets are
// 64-bit.
//
// The build defines, beside the types: NJI_PARAM_CODE (as NJI_STAT_CODE, for the parameters),
// NJI_FORWARD and NJI_BACKWARD (0 or 1: the kernels wanted).

struct nji_place {
    int row_lane, col_lane, col_lanes;
};

NJI_INLINE nji_place nji_my_place(int row_lanes, int rows_fast) {
    nji_place place;
    place.col_lanes = NJI_STRIDED_THREADS / row_lanes;
    place.row_lane = rows_fast ? threadIdx.x % row_lanes : threadIdx.x / place.col_lanes;
    place.col_lane = rows_fast ? threadIdx.x / row_lanes : threadIdx.x % place.col_lanes;
    return place;
}

// Both sums over the threads of a row, by a fixed tree; all of them get the result.
NJI_INLINE void nji_row_sums(const nji_place &place, nji_real &a, nji_real &b) {
    __shared__ nji_real tree[2][NJI_STRIDED_THREADS];
    const int first = place.row_lane * place.col_lanes, slot = first + place.col_lane;
    __syncthreads(); // until all have read an earlier result
    tree[0][slot] = a;
    tree[1][slot] = b;
    for (int half = place.col_lanes / 2; half > 0; half /= 2) {
        __syncthreads();
        if (place.col_lane < half) {
            tree[0][slot] += tree[0][slot + half];
            tree[1][slot] += tree[1][slot + half];
        }
    }
    __syncthreads();
    a = tree[0][first];
    b = tree[1][first];
}

NJI_INLINE nji_real nji_load_at(const nji_problem &p, const nji_operand &operand,
                                nji_i64 row_offset, nji_i64 col) {
    return nji_widen(((const NJI_X *)operand.data)[row_offset + nji_col_offset(p, operand, col)]);
}

NJI_INLINE nji_real nji_load_param(const nji_problem &p, const nji_operand &operand, nji_i64 col,
                                   nji_real absent) {
    if (!operand.data) return absent;
    return nji_load_any(operand.data, nji_col_offset(p, operand, col), NJI_PARAM_CODE);
}

#if NJI_FORWARD

// y, mean, rstd. y may be x. No columns: mean and rstd are 0/0.
extern "C" __global__ void __launch_bounds__(NJI_STRIDED_THREADS)
    nj_strided_forward(NJI_PARAMETER p) {
    nji_begin();
    const nji_place place = nji_my_place(p.row_lanes, p.rows_fast);
    const nji_i64 step = (nji_i64)gridDim.x * p.row_lanes;
    for (nji_i64 base = (nji_i64)blockIdx.x * p.row_lanes; base < p.rows; base += step) {
        const bool is_row = base + place.row_lane < p.rows;
        const nji_offsets at = nji_row_offsets(p, p.y, is_row ? base + place.row_lane : base);
        nji_real sum = 0, unused = 0, first = 0, second = 0;
#pragma unroll 4
        for (nji_i64 col = place.col_lane; col < p.cols; col += place.col_lanes) {
            sum += nji_load_at(p, p.x, at.x, col);
        }
        nji_row_sums(place, sum, unused);
        // Two passes: one pass cancels when |mean| >> std. shift is what rounding took from center.
        const nji_real center = sum / (nji_real)p.cols;
#pragma unroll 4
        for (nji_i64 col = place.col_lane; col < p.cols; col += place.col_lanes) {
            const nji_real d = nji_load_at(p, p.x, at.x, col) - center;
            first += d;
            second += d * d;
        }
        nji_row_sums(place, first, second);
        const nji_real shift = nji_shift_of(first / (nji_real)p.cols);
        nji_real variance = (second - first * shift) / (nji_real)p.cols;
        if (variance < 0) variance = 0; // by rounding; NaN stays
        const nji_real rstd = nji_rsqrt(variance + (nji_real)p.eps);
        if (!is_row) continue;
        for (nji_i64 col = place.col_lane; col < p.cols; col += place.col_lanes) {
            const nji_real xhat = ((nji_load_at(p, p.x, at.x, col) - center) - shift) * rstd;
            const nji_real y =
                xhat * nji_load_param(p, p.gamma, col, 1) + nji_load_param(p, p.beta, col, 0);
            nji_narrow(y, (NJI_X *)p.y.data + at.out + nji_col_offset(p, p.y, col));
        }
        if (place.col_lane == 0) nji_write_stats(p, at, center + shift, rstd);
    }
}

#endif
#if NJI_BACKWARD

// dx. dx may be x or dy: a thread reads an element again before it writes it, and no other reads it
// after the sums.
extern "C" __global__ void __launch_bounds__(NJI_STRIDED_THREADS)
    nj_strided_backward(NJI_PARAMETER p) {
    nji_begin();
    const nji_place place = nji_my_place(p.row_lanes, p.rows_fast);
    const nji_i64 step = (nji_i64)gridDim.x * p.row_lanes;
    for (nji_i64 base = (nji_i64)blockIdx.x * p.row_lanes; base < p.rows; base += step) {
        const bool is_row = base + place.row_lane < p.rows;
        const nji_offsets at = nji_row_offsets(p, p.dx, is_row ? base + place.row_lane : base);
        const nji_real mean = nji_load_any(p.mean.data, at.mean, NJI_STAT_CODE);
        const nji_real rstd = nji_load_any(p.rstd.data, at.rstd, NJI_STAT_CODE);
        nji_real sum_g = 0, sum_gx = 0;
#pragma unroll 4
        for (nji_i64 col = place.col_lane; col < p.cols; col += place.col_lanes) {
            const nji_real dy = nji_load_at(p, p.dy, at.dy, col);
            const nji_real g = dy * nji_load_param(p, p.gamma, col, 1);
            sum_g += g;
            sum_gx += g * ((nji_load_at(p, p.x, at.x, col) - mean) * rstd);
        }
        nji_row_sums(place, sum_g, sum_gx);
        const nji_real mean_g = sum_g / (nji_real)p.cols, mean_gx = sum_gx / (nji_real)p.cols;
        if (!is_row) continue;
        for (nji_i64 col = place.col_lane; col < p.cols; col += place.col_lanes) {
            const nji_real dy = nji_load_at(p, p.dy, at.dy, col);
            const nji_real g = dy * nji_load_param(p, p.gamma, col, 1);
            const nji_real xhat = (nji_load_at(p, p.x, at.x, col) - mean) * rstd;
            NJI_X *out = (NJI_X *)p.dx.data + at.out + nji_col_offset(p, p.dx, col);
            nji_real dx = rstd * (g - mean_g - xhat * mean_gx);
            if (p.accumulate & NJI_DX) dx += nji_widen(*out);
            nji_narrow(dx, out);
        }
    }
}

// Parts of dgamma and dbeta. Grid: x over tiles of 256 / row_lanes columns, y over the parts, each
// a run of rows. Launched before dx is written.
extern "C" __global__ void __launch_bounds__(NJI_STRIDED_THREADS)
    nj_strided_parts(NJI_PARAMETER p) {
    nji_begin();
    __shared__ nji_real total[2][NJI_STRIDED_THREADS];
    const nji_place place = nji_my_place(p.row_lanes, p.rows_fast);
    const nji_i64 col = (nji_i64)blockIdx.x * place.col_lanes + place.col_lane;
    const nji_i64 run = (p.rows + p.parts - 1) / p.parts;
    const nji_i64 from = run * blockIdx.y, to = from + run < p.rows ? from + run : p.rows;
    const bool wants_gamma = (p.grads & NJI_DGAMMA) != 0;
    nji_real gamma = 0, beta = 0;
    if (col < p.cols) {
        const nji_i64 dy_col = nji_col_offset(p, p.dy, col);
        const nji_i64 x_col = wants_gamma ? nji_col_offset(p, p.x, col) : 0;
#pragma unroll 4
        for (nji_i64 row = from + place.row_lane; row < to; row += p.row_lanes) {
            const nji_offsets at = nji_row_offsets(p, p.dx, row);
            const nji_real dy = nji_widen(((const NJI_X *)p.dy.data)[at.dy + dy_col]);
            beta += dy;
            if (wants_gamma) {
                const nji_real x = nji_widen(((const NJI_X *)p.x.data)[at.x + x_col]);
                const nji_real mean = nji_load_any(p.mean.data, at.mean, NJI_STAT_CODE);
                const nji_real rstd = nji_load_any(p.rstd.data, at.rstd, NJI_STAT_CODE);
                gamma += dy * ((x - mean) * rstd);
            }
        }
    }
    // Over the row lanes: a fixed tree.
    const int slot = place.row_lane * place.col_lanes + place.col_lane;
    total[0][slot] = gamma;
    total[1][slot] = beta;
    for (int half = p.row_lanes / 2; half > 0; half /= 2) {
        __syncthreads();
        if (place.row_lane < half) {
            total[0][slot] += total[0][slot + half * place.col_lanes];
            total[1][slot] += total[1][slot + half * place.col_lanes];
        }
    }
    if (place.row_lane != 0 || col >= p.cols) return;
    nji_real *out = (nji_real *)p.partial + (nji_i64)blockIdx.y * 2 * p.cols + col;
    out[0] = total[0][slot];
    out[p.cols] = total[1][slot];
}

// dgamma or dbeta = (old +) the sum of its partials, in the order of the parts.
// Block NJI_SUM_THREADS x 4 or more: NJI_SUM_WIDTH columns for each x, the parts dealt over y.
// Grid: columns / NJI_SUM_COLS, and y = the gradients wanted. parts may be 0. Serves the fast
// kernels, too.
extern "C" __global__ void __launch_bounds__(NJI_SUM_THREADS *NJI_SUM_LANES)
    nj_params_sum(NJI_PARAMETER p) {
    typedef nji_pack<nji_real, NJI_SUM_WIDTH> pack_type;
    __shared__ __align__(16) nji_real tree[NJI_SUM_LANES][NJI_SUM_COLS];
    const bool is_gamma = (p.grads & NJI_DGAMMA) && blockIdx.y == 0;
    const nji_operand &out = is_gamma ? p.dgamma : p.dbeta;
    const nji_i64 col = ((nji_i64)blockIdx.x * NJI_SUM_THREADS + threadIdx.x) * NJI_SUM_WIDTH;
    const int count = (int)(p.cols - col < NJI_SUM_WIDTH ? p.cols - col : NJI_SUM_WIDTH);
    nji_begin();
    nji_real sum[NJI_SUM_WIDTH] = {0};
    const nji_real *from = (const nji_real *)p.partial + (is_gamma ? 0 : p.cols) + col;
    const nji_i64 part_size = 2 * p.cols;
    if (count > 0 && p.cols % NJI_SUM_WIDTH == 0) {
        for (int first = threadIdx.y; first < p.parts; first += NJI_SUM_BATCH * blockDim.y) {
            pack_type pack[NJI_SUM_BATCH]; // all on their way at once
#pragma unroll
            for (int b = 0; b < NJI_SUM_BATCH; b++) {
                const int part = first + b * blockDim.y;
                if (part < p.parts) pack[b].load(from + part * part_size);
                else pack[b].zero();
            }
#pragma unroll
            for (int b = 0; b < NJI_SUM_BATCH; b++) {
                nji_real value[NJI_SUM_WIDTH];
                pack[b].widen(value);
#pragma unroll
                for (int i = 0; i < NJI_SUM_WIDTH; i++) sum[i] += value[i];
            }
        }
    } else {
        for (int part = threadIdx.y; part < p.parts; part += blockDim.y) {
#pragma unroll
            for (int i = 0; i < NJI_SUM_WIDTH; i++) {
                if (i < count) sum[i] += from[part * part_size + i];
            }
        }
    }
    ((pack_type *)tree[threadIdx.y])[threadIdx.x].narrow(sum);
    __syncthreads();
    // One thread for each column from here on.
    const int mine = threadIdx.y * NJI_SUM_THREADS + threadIdx.x;
    const nji_i64 at_col = (nji_i64)blockIdx.x * NJI_SUM_COLS + mine;
    if (mine >= NJI_SUM_COLS || at_col >= p.cols) return;
    nji_real total = tree[0][mine];
#pragma unroll 8
    for (int lane = 1; lane < blockDim.y; lane++) total += tree[lane][mine];
    const nji_i64 at = nji_col_offset(p, out, at_col);
    if (p.accumulate & (is_gamma ? NJI_DGAMMA : NJI_DBETA)) {
        total += nji_load_any(out.data, at, NJI_PARAM_CODE);
    }
    nji_store_any(total, out.data, at, NJI_PARAM_CODE);
}

#endif
