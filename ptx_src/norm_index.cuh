// Offsets of rows and columns; statistics. Used by every family.
//
// The build defines NJI_STAT_CODE: the nj_dtype of the statistics, a constant, or p.stat_dtype in kernels
// that serve any type.

// Splits index over dims [first, first + dims) and returns the operand's offset in elements.
NJI_INLINE nji_i64 nji_offset(const nji_problem &p, const nji_operand &operand, int first, int dims,
                              nji_i64 index) {
    nji_i64 offset = 0;
    if (dims == 1) return index * operand.stride[first];
#pragma unroll 1
    for (int d = first + dims - 1; d > first; d--) {
        const nji_i64 outer = index / p.extent[d];
        offset += (index - outer * p.extent[d]) * operand.stride[d];
        index = outer;
    }
    return dims == 0 ? 0 : offset + index * operand.stride[first];
}

NJI_INLINE nji_i64 nji_row_offset(const nji_problem &p, const nji_operand &operand, nji_i64 row) {
    return nji_offset(p, operand, 0, p.row_dims, row);
}

NJI_INLINE nji_i64 nji_col_offset(const nji_problem &p, const nji_operand &operand, nji_i64 col) {
    return nji_offset(p, operand, p.row_dims, p.col_dims, col);
}

NJI_INLINE nji_real nji_load_stat(const nji_problem &p, const nji_operand &operand, nji_i64 row) {
    return nji_load_any(operand.data, nji_row_offset(p, operand, row), NJI_STAT_CODE);
}

NJI_INLINE void nji_store_stat(const nji_problem &p, const nji_operand &operand, nji_i64 row,
                               nji_real value) {
    if (!operand.data) return;
    nji_store_any(value, operand.data, nji_row_offset(p, operand, row), NJI_STAT_CODE);
}
