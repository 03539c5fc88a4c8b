// Backward over rows that pass through the ring of norm_ring.cuh. A thread works on one row of its
// team's slice; parameter gradients add up in registers from row to row. No atomics; the order of
// every sum is fixed.
//
// NJI_KEEP: what stays in registers: 1 gamma, 2 also a row's terms until its dx.

#if !NJI_FORWARD

#define NJI_KEEPS_GAMMA (NJI_KEEP >= 1)
#define NJI_KEEPS_TERMS (NJI_KEEP >= 2 || !NJI_WANT_DX)

// ---- sums over a row ----------------------------------------------------------------------------

#if NJI_SENDERS > 1
__shared__ __align__(16) nji_real nji_exchange[2][NJI_TEAMS][NJI_SENDERS][2];
#endif

// Means over the columns of a row from the sums of its threads; equal bits in all of them. `round`
// counts the rows. Two halves of the exchange take turns: none is written before all have read it,
// since every warp sends its next sums only after that.
NJI_INLINE void nji_row_means(const nji_place &place, nji_real &a, nji_real &b, int round) {
    // One lane tells others that all have read: an exchange of values alone does not order reads.
    if (NJI_WARPS == 1 || NJI_SLICES > 1) __syncwarp();
    nji_real mine = nji_lanes_sum_split<32>(a, b);
#if NJI_SENDERS > 1
    nji_real(*slots)[2] = nji_exchange[round & 1][place.team];
    const int sender = place.slice * NJI_WARPS + place.warp;
#if NJI_SLICES > 1
    const nji_real other = nji_swap(mine, 16);
    nji_barrier *arrived = &nji_arrived[round & 1][place.team];
    if (nji_leads(place)) nji_barrier_expect(arrived, NJI_SENDERS * 2 * (int)sizeof(nji_real));
    if (place.thread < NJI_SLICES) {
        nji_cluster_send(slots[sender], mine, other, arrived, place.thread);
    }
    nji_barrier_wait(arrived, round >> 1 & 1);
#else
    if (place.thread % 16 == 0) slots[sender][place.thread / 16] = mine;
    nji_meet(place);
#endif
    if (NJI_SENDERS <= 8) {
        a = slots[0][0];
        b = slots[0][1];
#pragma unroll
        for (int i = 1; i < NJI_SENDERS; i++) {
            a += slots[i][0];
            b += slots[i][1];
        }
        a /= (nji_real)NJI_COLS;
        b /= (nji_real)NJI_COLS;
        return;
    }
    a = b = 0;
#pragma unroll
    for (int i = 0; i < NJI_SENDERS; i += 32) {
        if (i + place.thread < NJI_SENDERS) {
            a += slots[i + place.thread][0];
            b += slots[i + place.thread][1];
        }
    }
    mine = nji_lanes_sum_split<32>(a, b);
#endif
    mine /= (nji_real)NJI_COLS;
    const nji_real theirs = nji_swap(mine, 16);
    const bool upper = place.thread >= 16;
    a = upper ? theirs : mine;
    b = upper ? mine : theirs;
}

// ---- a row --------------------------------------------------------------------------------------

struct nji_gradients {
    nji_real gamma[NJI_CHUNKS][NJI_VEC], beta[NJI_CHUNKS][NJI_VEC];
};

// A product that does not melt into a following sum, which would keep digits that a sum of such
// products has lost: their difference must vanish where they agree. The products of 16-bit types
// are exact and may melt.
NJI_INLINE nji_real nji_product(float a, float b) {
    return sizeof(NJI_X) == 2 && sizeof(NJI_P) == 2 ? a * b : __fmul_rn(a, b);
}
NJI_INLINE nji_real nji_product(double a, double b) {
    return __dmul_rn(a, b);
}

NJI_INLINE void nji_load_gamma(const nji_problem &p, int column, nji_real out[NJI_VEC]) {
    nji_pack_p raw;
    raw.zero();
    if (NJI_HAS_GAMMA && NJI_WANT_DX && nji_is_column(column)) {
        raw.load((const NJI_P *)p.gamma.data + column);
    }
    raw.widen(out);
}

// gamma where it is kept in registers.
struct nji_kept_gamma {
    nji_real of[NJI_KEEPS_GAMMA ? NJI_CHUNKS : 1][NJI_VEC];

    __device__ __forceinline__ void keep(const nji_problem &p, const nji_place &place) {
#pragma unroll
        for (int k = 0; k < NJI_CHUNKS && NJI_KEEPS_GAMMA; k++) {
            nji_load_gamma(p, nji_column(place, k), of[k]);
#pragma unroll
            for (int i = 0; i < NJI_VEC; i++) of[k][i] = nji_pin(of[k][i]);
        }
    }
    __device__ __forceinline__ void get(const nji_problem &p, const nji_place &place, int chunk,
                                        nji_real out[NJI_VEC]) const {
        if (!NJI_KEEPS_GAMMA) nji_load_gamma(p, nji_column(place, chunk), out);
#pragma unroll
        for (int i = 0; i < NJI_VEC && NJI_KEEPS_GAMMA; i++) out[i] = of[chunk][i];
    }
};

// dy, xhat and g = dy*gamma of a pack.
struct nji_terms {
    nji_real dy[NJI_VEC], xhat[NJI_VEC], g[NJI_VEC];
};

NJI_INLINE void nji_read_terms(const nji_slot *slot, int pack, const nji_note &note,
                               const nji_real gamma[NJI_VEC], nji_terms &out) {
    nji_pack_x raw;
    raw.load(slot->dy + pack * NJI_VEC);
    raw.widen(out.dy);
    if (NJI_WANT_X) {
        raw.load(slot->x + pack * NJI_VEC);
        raw.widen(out.xhat);
    }
#pragma unroll
    for (int i = 0; i < NJI_VEC; i++) {
        if (NJI_WANT_X) out.xhat[i] = (out.xhat[i] - note.mean) * note.rstd;
        out.g[i] = NJI_HAS_GAMMA && NJI_WANT_DX ? nji_product(out.dy[i], gamma[i]) : out.dy[i];
    }
}

// dx = rstd*(g - mean_g - xhat*mean_gx). The differences come before the product: they are exactly
// 0 where the terms agree, as with one column.
NJI_INLINE void nji_write_dx(NJI_X *to, const nji_terms &terms, nji_real rstd, nji_real mean_g,
                             nji_real mean_gx) {
    nji_pack_x out;
    nji_real dx[NJI_VEC];
#pragma unroll
    for (int i = 0; i < NJI_VEC; i++) {
        dx[i] = rstd * (terms.g[i] - mean_g - terms.xhat[i] * mean_gx);
    }
    if (NJI_ACCUMULATE & 1) {
        nji_real old[NJI_VEC];
        out.load(to);
        out.widen(old);
#pragma unroll
        for (int i = 0; i < NJI_VEC; i++) dx[i] += old[i];
    }
    out.narrow(dx);
    out.store(to);
}

// ---- parameter gradients ------------------------------------------------------------------------

// A pack of a gradient goes to this cluster's part of the workspace; of a single cluster's it is
// all there is, and no other kernel adds it up.
NJI_INLINE void nji_write_sums(const nji_problem &p, int which, int column,
                               const nji_real sum[NJI_VEC]) {
    if (p.parts > 1) {
        nji_real *part = (nji_real *)p.partial + (nji_i64)(blockIdx.x / NJI_SLICES) * 2 * NJI_COLS;
        nji_pack<nji_real, NJI_VEC> out;
        out.narrow(sum);
        out.store(part + which * NJI_COLS + column);
        return;
    }
    NJI_P *to = (NJI_P *)(which == 0 ? p.dgamma : p.dbeta).data + column;
    const bool adds = (p.accumulate & (which == 0 ? NJI_DGAMMA : NJI_DBETA)) != 0;
#pragma unroll
    for (int i = 0; i < NJI_VEC; i++) nji_narrow(adds ? nji_widen(to[i]) + sum[i] : sum[i], &to[i]);
}

// The sums of a thread in the ring's memory, of which none may be on its way any more.
NJI_INLINE nji_pack<nji_real, NJI_VEC> *nji_sums_of(const nji_place &place, int team, int which,
                                                    int chunk) {
    return (nji_pack<nji_real, NJI_VEC> *)nji_ring + (team * 2 + which) * NJI_CHUNKS * NJI_LANES +
           nji_pack_of(place, chunk);
}

// All workers of the block. With 15 teams or more, each is a warp and meets without a barrier.
NJI_INLINE void nji_workers_meet() {
    nji_team_sync(NJI_TEAMS < 15 ? NJI_TEAMS : 0, NJI_WORKERS);
}

// The teams' sums, added in their order.
NJI_INLINE void nji_write_gradients(const nji_problem &p, const nji_place &place,
                                    nji_gradients &gradients) {
#if NJI_TEAMS > 1
    nji_workers_meet(); // of all teams
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) {
        if (NJI_WANT_DGAMMA) nji_sums_of(place, place.team, 0, k)->narrow(gradients.gamma[k]);
        if (NJI_WANT_DBETA) nji_sums_of(place, place.team, 1, k)->narrow(gradients.beta[k]);
    }
    nji_workers_meet();
#pragma unroll
    for (int which = 0; which < 2; which++) {
        if (!(which == 0 ? NJI_WANT_DGAMMA : NJI_WANT_DBETA)) continue;
#pragma unroll
        for (int k = 0; k < NJI_CHUNKS; k++) {
            const int column = nji_column(place, k);
            nji_real sum[NJI_VEC], more[NJI_VEC];
            if ((which * NJI_CHUNKS + k) % NJI_TEAMS != place.team) continue;
            if (!nji_is_column(column)) continue;
            nji_sums_of(place, 0, which, k)->widen(sum);
#pragma unroll
            for (int team = 1; team < NJI_TEAMS; team++) {
                nji_sums_of(place, team, which, k)->widen(more);
#pragma unroll
                for (int i = 0; i < NJI_VEC; i++) sum[i] += more[i];
            }
            nji_write_sums(p, which, column, sum);
        }
    }
#else
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) {
        const int column = nji_column(place, k);
        if (!nji_is_column(column)) continue;
        if (NJI_WANT_DGAMMA) nji_write_sums(p, 0, column, gradients.gamma[k]);
        if (NJI_WANT_DBETA) nji_write_sums(p, 1, column, gradients.beta[k]);
    }
#endif
}

// ---- the kernel ---------------------------------------------------------------------------------

NJI_INLINE void nji_work(const nji_problem &p, const nji_place &place) {
    nji_kept_gamma kept;
    nji_gradients gradients;
    nji_turn turn = {0, 0};
    int round = 0;
    kept.keep(p, place);
#pragma unroll
    for (int k = 0; k < NJI_CHUNKS; k++) {
#pragma unroll
        for (int i = 0; i < NJI_VEC; i++) gradients.gamma[k][i] = gradients.beta[k][i] = 0;
    }
#pragma unroll 1
    for (nji_i64 row = place.first; row < p.rows; row += place.step, round++) {
        const nji_slot *slot = nji_slot_of(turn.stage, place.team);
        nji_barrier *free = &nji_free[turn.stage][place.team];
        nji_terms terms[NJI_KEEPS_TERMS ? NJI_CHUNKS : 1];
        nji_real gamma[NJI_VEC], sum_g = 0, sum_gx = 0;
        nji_barrier_wait(&nji_full[turn.stage][place.team], turn.phase);
        const nji_note note = nji_notes[turn.stage][place.team];
#pragma unroll
        for (int k = 0; k < NJI_CHUNKS; k++) {
            nji_terms &term = terms[NJI_KEEPS_TERMS ? k : 0];
            if (!nji_is_column(nji_column(place, k))) continue;
            kept.get(p, place, k, gamma);
            nji_read_terms(slot, nji_pack_of(place, k), note, gamma, term);
#pragma unroll
            for (int i = 0; i < NJI_VEC; i++) {
                const nji_real product = term.dy[i] * term.xhat[i];
                if (NJI_WANT_DX) {
                    sum_g += term.g[i];
                    sum_gx += NJI_HAS_GAMMA ? gamma[i] * product : product;
                }
                if (NJI_WANT_DGAMMA) gradients.gamma[k][i] += product;
                if (NJI_WANT_DBETA) gradients.beta[k][i] += term.dy[i];
            }
        }
        // When these have met, all of the team have read the row.
        if (NJI_WANT_DX) nji_row_means(place, sum_g, sum_gx, round);
        else nji_meet(place);
        if (NJI_KEEPS_TERMS && nji_leads(place)) nji_barrier_arrive(free);
        if (NJI_WANT_DX) {
            NJI_X *to = (NJI_X *)p.dx.data + note.out;
#pragma unroll
            for (int k = 0; k < NJI_CHUNKS; k++) {
                const int column = nji_column(place, k);
                if (!nji_is_column(column)) continue;
                if (!NJI_KEEPS_TERMS) {
                    kept.get(p, place, k, gamma);
                    nji_read_terms(slot, nji_pack_of(place, k), note, gamma, terms[0]);
                }
                nji_write_dx(to + column, terms[NJI_KEEPS_TERMS ? k : 0], note.rstd, sum_g, sum_gx);
            }
        }
        if (!NJI_KEEPS_TERMS) {
            nji_meet(place);
            if (nji_leads(place)) nji_barrier_arrive(free);
        }
        nji_advance(turn);
    }
    nji_write_gradients(p, place, gradients);
}

// dx, and for each cluster one part of the parameter gradients or, for one cluster, the gradients;
// rows >= 1; dx may be x or dy.
NJI_KERNEL nj_ring_backward(NJI_PARAMETER p) {
    nji_run(p);
}

#endif
