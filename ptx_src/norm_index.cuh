// Offsets of rows and columns; statistics. Used by every family.
//
// The build defines NJI_STAT_CODE: the nj_dtype of the statistics, a constant, or p.stat_dtype in a
// build for any type.

// Kept out of line: the 64-bit division is long, stands in many places and is seldom reached.
static __device__ __noinline__ nji_i64 nji_divide(nji_i64 index, nji_i64 extent) {
    return index / extent;
}

// Where a column lies within a row of the operand, in elements. (With no col dims col is 0.)
NJI_INLINE nji_i64 nji_col_offset(const nji_problem &p, const nji_operand &operand, nji_i64 col) {
    nji_i64 offset = 0;
    if (p.col_dims == 0) return 0;
#pragma unroll 1
    for (int d = p.row_dims + p.col_dims - 1; d > p.row_dims; d--) {
        const nji_i64 outer = nji_divide(col, p.extent[d]);
        offset += (col - outer * p.extent[d]) * operand.stride[d];
        col = outer;
    }
    return offset + col * operand.stride[p.row_dims];
}

// Where a row lies in each operand, in elements.
struct nji_offsets {
    nji_i64 x, dy, out, mean, rstd;
};

// out is y or dx. One way for all operands, so that the usual single row dim costs one branch.
NJI_INLINE nji_offsets nji_row_offsets(const nji_problem &p, const nji_operand &out, nji_i64 row) {
    nji_offsets at = {0, 0, 0, 0, 0};
#pragma unroll 1
    for (int d = p.row_dims - 1; d > 0; d--) {
        const nji_i64 outer = nji_divide(row, p.extent[d]), index = row - outer * p.extent[d];
        at.x += index * p.x.stride[d];
        at.dy += index * p.dy.stride[d];
        at.out += index * out.stride[d];
        at.mean += index * p.mean.stride[d];
        at.rstd += index * p.rstd.stride[d];
        row = outer;
    }
    at.x += row * p.x.stride[0];
    at.dy += row * p.dy.stride[0];
    at.out += row * out.stride[0];
    at.mean += row * p.mean.stride[0];
    at.rstd += row * p.rstd.stride[0];
    return at;
}

NJI_INLINE void nji_write_stats(const nji_problem &p, const nji_offsets &at, nji_real mean,
                                nji_real rstd) {
    if (p.mean.data) nji_store_any(mean, p.mean.data, at.mean, NJI_STAT_CODE);
    if (p.rstd.data) nji_store_any(rstd, p.rstd.data, at.rstd, NJI_STAT_CODE);
}
