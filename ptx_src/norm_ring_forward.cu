// Forward over rows that pass through the ring of norm_ring.cuh: x is read once, y written once.
//
// Mapping. Each warp finds the moments of its own columns in two passes over registers; one
// exchange among the warps that share a row joins them. A warp's columns are the same whatever the
// number of teams, slices and stages, and so are a row's bits. y may be x: a row is read before it
// is written.
//
// NJI_KEEP: gamma and beta are 0 read anew for each row, 1 kept in registers as they lie in memory,
// 2 kept widened. 4 more: x is read from the ring once more for y, which takes fewer registers.

#if NJI_FORWARD

#define NJI_KEEPS_PARAMS (NJI_KEEP & 3)
#define NJI_READS_TWICE ((NJI_KEEP & 4) != 0)

#define NJI_WARP_WIDTH (32 * NJI_CHUNKS * NJI_VEC) // columns of a warp

// ---- moments ------------------------------------------------------------------------------------

// Of some columns. Their mean is center + shift: center is the rounded one, shift what rounding
// took; squares is the sum of squared deviations.
struct nji_moments {
    nji_real center, shift, squares;
};

// Columns of a warp among those that share a row.
NJI_INLINE nji_real nji_count_of(int sender) {
    const int left = NJI_COLS - sender * NJI_WARP_WIDTH;
    if (NJI_WIDTH * NJI_SLICES == NJI_COLS || left > NJI_WARP_WIDTH) return NJI_WARP_WIDTH;
    return (nji_real)(left < 0 ? 0 : left);
}

// Two passes: one pass cancels when |mean| >> std. Columns past the last are zeros. Four sums go
// side by side, since each waits for its last addition.
NJI_INLINE nji_moments nji_warp_moments(const nji_place &place,
                                        const nji_pack_x x[NJI_CHUNKS], nji_real count) {
    nji_moments out = {0, 0, 0};
    nji_real sum[4] = {0, 0, 0, 0}, first[2] = {0, 0}, second[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) {
        nji_real value[NJI_VEC];
        x[k].widen(value);
#pragma unroll
        for (int i = 0; i < NJI_VEC; i++) sum[i % 4] += value[i];
    }
    out.center = nji_lanes_sum<32>((sum[0] + sum[1]) + (sum[2] + sum[3]));
    if (count > 0) out.center /= count;
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) {
        nji_real value[NJI_VEC];
        x[k].widen(value);
        if (!nji_is_column(nji_column(place, k))) continue;
#pragma unroll
        for (int i = 0; i < NJI_VEC; i++) {
            const nji_real d = value[i] - out.center;
            first[i % 2] += d;
            second[i % 2] += d * d;
        }
    }
    const nji_real mine = nji_lanes_sum_split<32>(first[0] + first[1], second[0] + second[1]);
    const nji_real other = nji_swap(mine, 16);
    const nji_real d = place.thread < 16 ? mine : other;
    if (count > 0) out.shift = nji_shift_of(d / count);
    out.squares = (place.thread < 16 ? other : mine) - d * out.shift;
    return out;
}

#if NJI_SENDERS > 1
// center, shift, squares, nothing.
typedef nji_real nji_message[4];

__shared__ __align__(16) nji_message nji_exchange[2][NJI_TEAMS][NJI_SENDERS];

// Every warp's moments to all that share the row. Two halves of the exchange take turns: none is
// written before all have read it, since every warp sends its next moments only after that.
NJI_INLINE const nji_message *nji_share(const nji_place &place, const nji_moments &mine,
                                        int round) {
    nji_message *slots = nji_exchange[round & 1][place.team];
    const int sender = place.slice * NJI_WARPS + place.warp;
#if NJI_SLICES > 1
    nji_barrier *arrived = &nji_arrived[round & 1][place.team];
    // Whoever tells that this warp has read something, one of its lanes, tells it for all of them.
    __syncwarp();
    if (nji_leads(place)) nji_barrier_expect(arrived, NJI_SENDERS * 4 * (int)sizeof(nji_real));
    if (place.thread < NJI_SLICES) {
        nji_cluster_send(slots[sender], mine.center, mine.shift, arrived, place.thread);
        nji_cluster_send(slots[sender] + 2, mine.squares, 0, arrived, place.thread);
    }
    nji_barrier_wait(arrived, round >> 1 & 1);
#else
    if (place.thread == 0) {
        slots[sender][0] = mine.center;
        slots[sender][1] = mine.shift;
        slots[sender][2] = mine.squares;
    }
    nji_meet(place);
#endif
    return slots;
}

// What a warp adds to the row's sums around its center.
NJI_INLINE void nji_add_moments(const nji_message &from, nji_real count, nji_real center,
                                nji_real &first, nji_real &second) {
    const nji_real d = (from[0] - center) + from[1]; // the difference is exact where it is small
    const nji_real part = count * d;
    first += part;
    second += from[2] + part * d;
}

// Moments of the whole row, joined as by Chan, Golub and LeVeque (1983): around a center that all
// share, so that a large mean cancels before anything is squared. Equal bits in all threads.
NJI_INLINE nji_moments nji_join(const nji_place &place, const nji_message *slots) {
    nji_moments out;
    nji_real sum = 0, first = 0, second = 0;
    if (NJI_SENDERS <= 8) {
#pragma unroll
        for (int i = 0; i < NJI_SENDERS; i++) sum += nji_count_of(i) * slots[i][0];
        out.center = sum / (nji_real)NJI_COLS;
#pragma unroll
        for (int i = 0; i < NJI_SENDERS; i++) {
            nji_add_moments(slots[i], nji_count_of(i), out.center, first, second);
        }
    } else {
#pragma unroll
        for (int i = place.thread; i < NJI_SENDERS; i += 32) sum += nji_count_of(i) * slots[i][0];
        out.center = nji_lanes_sum<32>(sum) / (nji_real)NJI_COLS;
#pragma unroll
        for (int i = place.thread; i < NJI_SENDERS; i += 32) {
            nji_add_moments(slots[i], nji_count_of(i), out.center, first, second);
        }
        const nji_real mine = nji_lanes_sum_split<32>(first, second);
        const nji_real other = nji_swap(mine, 16);
        first = place.thread < 16 ? mine : other;
        second = place.thread < 16 ? other : mine;
    }
    out.shift = nji_shift_of(first / (nji_real)NJI_COLS);
    out.squares = second - first * out.shift;
    return out;
}
#endif

// ---- parameters ---------------------------------------------------------------------------------

// gamma or beta: for each pack as NJI_KEEP says.
struct nji_param {
    nji_pack_p raw[NJI_KEEPS_PARAMS == 1 ? NJI_CHUNKS : 1];
    nji_real wide[NJI_KEEPS_PARAMS == 2 ? NJI_CHUNKS : 1][NJI_VEC];

    __device__ __forceinline__ void load(const nji_operand &operand, int column,
                                         nji_pack_p &out) const {
        if (nji_is_column(column)) out.load((const NJI_P *)operand.data + column);
        else out.zero();
    }
    __device__ __forceinline__ void keep(const nji_operand &operand, const nji_place &place) {
#pragma unroll
        for (int k = 0; k < NJI_CHUNKS && NJI_KEEPS_PARAMS == 1; k++) {
            load(operand, nji_column(place, k), raw[k]);
        }
#pragma unroll
        for (int k = 0; k < NJI_CHUNKS && NJI_KEEPS_PARAMS == 2; k++) {
            load(operand, nji_column(place, k), raw[0]);
            raw[0].widen(wide[k]);
#pragma unroll
            for (int i = 0; i < NJI_VEC; i++) wide[k][i] = nji_pin(wide[k][i]);
        }
    }
    __device__ __forceinline__ void get(const nji_operand &operand, int column, int chunk,
                                        nji_real out[NJI_VEC]) const {
        if (NJI_KEEPS_PARAMS == 2) {
#pragma unroll
            for (int i = 0; i < NJI_VEC; i++) out[i] = wide[chunk][i];
            return;
        }
        nji_pack_p pack = raw[NJI_KEEPS_PARAMS == 1 ? chunk : 0];
        if (NJI_KEEPS_PARAMS == 0) load(operand, column, pack);
        pack.pin(); // else the compiler widens once, before the loop
        pack.widen(out);
    }
};

// ---- a row --------------------------------------------------------------------------------------

NJI_INLINE void nji_read_x(const nji_slot *slot, const nji_place &place, int chunk,
                           nji_pack_x &out) {
    if (nji_is_column(nji_column(place, chunk))) {
        out.load(slot->x + nji_pack_of(place, chunk) * NJI_VEC);
    } else {
        out.zero();
    }
}

// The differences come first: they are exactly 0 where all columns are equal.
NJI_INLINE void nji_write_y(const nji_problem &p, const nji_place &place, nji_i64 at,
                            const nji_slot *slot, nji_pack_x x[NJI_CHUNKS],
                            const nji_moments &moments, nji_real rstd,
                            const nji_param &gamma, const nji_param &beta) {
    NJI_X *to = (NJI_X *)p.y.data + at;
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) {
        const int column = nji_column(place, k);
        nji_real value[NJI_VEC], scale[NJI_VEC], offset[NJI_VEC];
        nji_pack_x out;
        if (!nji_is_column(column)) continue;
        if (NJI_READS_TWICE) nji_read_x(slot, place, k, x[k]);
        x[k].widen(value);
        if (NJI_HAS_GAMMA) gamma.get(p.gamma, column, k, scale);
        if (NJI_HAS_BETA) beta.get(p.beta, column, k, offset);
#pragma unroll
        for (int i = 0; i < NJI_VEC; i++) {
            value[i] = ((value[i] - moments.center) - moments.shift) * rstd;
            if (NJI_HAS_GAMMA) value[i] *= scale[i];
            if (NJI_HAS_BETA) value[i] += offset[i];
        }
        out.narrow(value);
        out.store(to + column);
    }
}

// ---- the kernel ---------------------------------------------------------------------------------

// A team of one warp without fillers: puts the next row on its way into a slot that is free.
NJI_INLINE void nji_refill(const nji_problem &p, const nji_place &place, int stage,
                           nji_walk &walk) {
    if (walk.row < p.rows && place.thread == 0) {
        nji_fill_slot(p, place, stage, walk, nji_read_note(p, walk));
    }
    walk.advance(p);
}

// This warp has read all that it wants of a slot.
NJI_INLINE void nji_release(const nji_problem &p, const nji_place &place, int stage,
                            nji_walk &walk) {
    __syncwarp();
    if (NJI_FILLERS == 0) nji_refill(p, place, stage, walk);
    else if (place.thread == 0) nji_barrier_arrive(&nji_free[stage][place.team]);
}

NJI_INLINE void nji_work(const nji_problem &p, const nji_place &place) {
    const int sender = place.slice * NJI_WARPS + place.warp;
    nji_walk walk(p, place.first, place.step);
    nji_param gamma, beta;
    nji_turn turn = {0, 0};
    int round = 0;
#pragma unroll 1
    for (int i = 0; i < NJI_STAGES && NJI_FILLERS == 0; i++) nji_refill(p, place, i, walk);
    if (NJI_HAS_GAMMA) gamma.keep(p.gamma, place);
    if (NJI_HAS_BETA) beta.keep(p.beta, place);
#pragma unroll 1
    for (nji_i64 row = place.first; row < p.rows; row += place.step, round++) {
        const nji_slot *slot = nji_slot_of(turn.stage, place.team);
        nji_pack_x x[NJI_CHUNKS];
        nji_barrier_wait(&nji_full[turn.stage][place.team], turn.phase);
        const nji_i64 at = nji_notes[turn.stage][place.team].out;
#pragma unroll
        for (int k = 0; k < NJI_CHUNKS; k++) nji_read_x(slot, place, k, x[k]);
        if (!NJI_READS_TWICE) nji_release(p, place, turn.stage, walk);
        nji_moments moments = nji_warp_moments(place, x, nji_count_of(sender));
#if NJI_SENDERS > 1
        moments = nji_join(place, nji_share(place, moments, round));
#endif
        const nji_real rstd = nji_rstd_of(moments.squares, NJI_COLS, (nji_real)p.eps);
        nji_write_y(p, place, at, slot, x, moments, rstd, gamma, beta);
        if (NJI_READS_TWICE) nji_release(p, place, turn.stage, walk);
        if (nji_leads(place) && place.slice == 0) {
            nji_write_stats(p, nji_row_offsets(p, p.y, row), moments.center + moments.shift, rstd);
        }
        nji_advance(turn);
    }
}

// y, mean, rstd. One row for each team of a cluster at a time; rows >= 1; y may be x.
NJI_KERNEL nj_ring_forward(NJI_PARAMETER p) {
    nji_run(p);
}

#endif
