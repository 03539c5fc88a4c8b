// Rows of unit-stride columns pass through a ring in shared memory (sm_90 and later): while a row
// is worked on, the next ones are on their way. Each operand is read once. What both directions
// share; norm_ring_forward.cu and norm_ring.cu define nji_work, what the threads of a team do.
//
// Mapping. A row is cut in NJI_SLICES slices, one for each block of a cluster. Within a block a
// team of NJI_LANES threads, whole warps, shares a slice; a block holds several teams, each with a
// row of its own, and warps that do nothing but fill the ring: a worker that did would hold up all
// who share its row. (Forward, where a team is one warp, there may be none: it fills its own
// slots.) A thread has NJI_CHUNKS packs of NJI_VEC columns, a warp's packs lie side by side;
// neither the number of teams nor the cut in slices changes a row's sums. No atomics; the order of
// every sum is fixed. Offsets are 64-bit.
//
// The build defines, beside the types: NJI_COLS, NJI_VEC, NJI_LANES, NJI_CHUNKS, NJI_WORKERS
// (threads of all teams), NJI_THREADS (with the filling warps), NJI_SLICES, NJI_STAGES (rows of a
// team in the ring), NJI_KEEP (what stays in registers; its values are in the kernels' files),
// NJI_P (parameter type), NJI_FORWARD (0 or 1), NJI_HAS_GAMMA, NJI_HAS_BETA, NJI_GRADS,
// NJI_ACCUMULATE.

#define NJI_TEAMS (NJI_WORKERS / NJI_LANES)            // of a block
#define NJI_FILLERS ((NJI_THREADS - NJI_WORKERS) / 32) // warps that fill the ring
#define NJI_WARPS (NJI_LANES / 32)                     // of a team, in a block
#define NJI_WIDTH (NJI_LANES * NJI_CHUNKS * NJI_VEC)   // columns of a slice
#define NJI_SENDERS (NJI_WARPS * NJI_SLICES)           // warps that share a row

#define NJI_WANT_DX ((NJI_GRADS & 1) != 0)
#define NJI_WANT_DGAMMA ((NJI_GRADS & 2) != 0)
#define NJI_WANT_DBETA ((NJI_GRADS & 4) != 0)
#define NJI_WANT_X (NJI_FORWARD || NJI_WANT_DX || NJI_WANT_DGAMMA)

#if NJI_FORWARD
#define NJI_OUT y
#else
#define NJI_OUT dx
#endif

#if NJI_SLICES > 1
#define NJI_KERNEL                                                                                 \
    extern "C" __global__ void __cluster_dims__(NJI_SLICES, 1, 1) __launch_bounds__(NJI_THREADS, 1)
#else
#define NJI_KERNEL extern "C" __global__ void __launch_bounds__(NJI_THREADS, 1)
#endif

typedef nji_pack<NJI_X, NJI_VEC> nji_pack_x;
typedef nji_pack<NJI_P, NJI_VEC> nji_pack_p;

// Where a thread works.
struct nji_place {
    int team, warp, thread; // of the block, of the team, of the warp
    int slice;
    nji_i64 first, step; // the team's first row and the distance to its next
};

// Teams of neighbouring clusters have neighbouring rows.
NJI_INLINE nji_place nji_place_of(int team, int warp) {
    nji_place place;
    const int clusters = gridDim.x / NJI_SLICES, cluster = blockIdx.x / NJI_SLICES;
    place.team = team;
    place.warp = warp;
    place.thread = threadIdx.x % 32;
    place.slice = NJI_SLICES == 1 ? 0 : blockIdx.x % NJI_SLICES;
    place.first = (nji_i64)team * clusters + cluster;
    place.step = (nji_i64)clusters * NJI_TEAMS;
    return place;
}

// One worker of each team in the block.
NJI_INLINE bool nji_leads(const nji_place &place) {
    return place.warp == 0 && place.thread == 0;
}

// A pack of this thread, counted in its slice.
NJI_INLINE int nji_pack_of(const nji_place &place, int chunk) {
    return (place.warp * NJI_CHUNKS + chunk) * 32 + place.thread;
}

NJI_INLINE int nji_column(const nji_place &place, int chunk) {
    return place.slice * NJI_WIDTH + nji_pack_of(place, chunk) * NJI_VEC;
}

// Folds to true where the packs cover the columns exactly.
NJI_INLINE bool nji_is_column(int column) {
    return NJI_WIDTH * NJI_SLICES == NJI_COLS || column < NJI_COLS;
}

// ---- the ring -----------------------------------------------------------------------------------

// A team's row in the ring.
struct nji_slot {
#if !NJI_FORWARD
    NJI_X dy[NJI_WIDTH];
#endif
    NJI_X x[NJI_WIDTH];
};

// What comes with a row.
struct __align__(16) nji_note {
#if !NJI_FORWARD
    nji_real mean, rstd;
#endif
    nji_i64 out; // offset in y or dx
};

extern __shared__ __align__(128) unsigned char nji_ring[]; // nji_slot [NJI_STAGES][NJI_TEAMS]

__shared__ nji_note nji_notes[NJI_STAGES][NJI_TEAMS];
__shared__ nji_barrier nji_full[NJI_STAGES][NJI_TEAMS], nji_free[NJI_STAGES][NJI_TEAMS];

NJI_INLINE nji_slot *nji_slot_of(int stage, int team) {
    return (nji_slot *)nji_ring + stage * NJI_TEAMS + team;
}

// The stage that comes next, and the phase of its barriers.
struct nji_turn {
    int stage, phase;
};

NJI_INLINE void nji_advance(nji_turn &turn) {
    if (++turn.stage < NJI_STAGES) return;
    turn.stage = 0;
    turn.phase ^= 1;
}

// A team's way over its rows. With one row dim, the usual, a step is a few sums.
struct nji_walk {
    nji_i64 row, step;
    nji_offsets at, by;

    __device__ __forceinline__ nji_walk(const nji_problem &p, nji_i64 first, nji_i64 distance) {
        row = first;
        step = distance;
        at = nji_row_offsets(p, p.NJI_OUT, row);
        by = nji_row_offsets(p, p.NJI_OUT, step);
    }
    __device__ __forceinline__ void advance(const nji_problem &p) {
        row += step;
        if (p.row_dims > 1) {
            at = nji_row_offsets(p, p.NJI_OUT, row);
            return;
        }
        at.x += by.x;
        at.dy += by.dy;
        at.out += by.out;
        at.mean += by.mean;
        at.rstd += by.rstd;
    }
};

NJI_INLINE nji_note nji_read_note(const nji_problem &p, const nji_walk &walk) {
    nji_note note;
    note.out = walk.at.out;
#if !NJI_FORWARD
    note.mean = note.rstd = 0;
    if (NJI_WANT_X && walk.row < p.rows) {
        note.mean = nji_load_any(p.mean.data, walk.at.mean, NJI_STAT_CODE);
        note.rstd = nji_load_any(p.rstd.data, walk.at.rstd, NJI_STAT_CODE);
    }
#endif
    return note;
}

// Starts a row on its way into a free slot. One thread for each team.
NJI_INLINE void nji_fill_slot(const nji_problem &p, const nji_place &place, int stage,
                              const nji_walk &walk, const nji_note &note) {
    nji_slot *slot = nji_slot_of(stage, place.team);
    nji_barrier *full = &nji_full[stage][place.team];
    const int first = place.slice * NJI_WIDTH;
    const int left = NJI_COLS - first, count = left < NJI_WIDTH ? left : NJI_WIDTH;
    const int bytes = count < 0 ? 0 : count * (int)sizeof(NJI_X); // the last slices may be empty
#if !NJI_FORWARD
    if (bytes > 0) {
        nji_copy_bulk(slot->dy, (const NJI_X *)p.dy.data + walk.at.dy + first, bytes, full);
    }
#endif
    if (NJI_WANT_X && bytes > 0) {
        nji_copy_bulk(slot->x, (const NJI_X *)p.x.data + walk.at.x + first, bytes, full);
    }
    nji_notes[stage][place.team] = note;
    nji_barrier_expect(full, NJI_WANT_X && !NJI_FORWARD ? 2 * bytes : bytes);
}

// Fills the slots of a team as they become free. One thread for each team.
NJI_INLINE void nji_fill(const nji_problem &p, const nji_place &place) {
    nji_turn turn = {0, 1}; // all are free at first
    nji_walk walk(p, place.first, place.step);
    // What a row needs besides its elements must not wait behind those of later rows.
    nji_walk ahead = walk;
    nji_note note = nji_read_note(p, ahead);
    ahead.advance(p);
    nji_note next = nji_read_note(p, ahead);
#pragma unroll 1
    for (; walk.row < p.rows; walk.advance(p)) {
        nji_barrier_wait(&nji_free[turn.stage][place.team], turn.phase);
        nji_fill_slot(p, place, turn.stage, walk, note);
        note = next;
        ahead.advance(p);
        next = nji_read_note(p, ahead);
        nji_advance(turn);
    }
}

// ---- meeting ------------------------------------------------------------------------------------

#if NJI_SLICES > 1
__shared__ nji_barrier nji_arrived[2][NJI_TEAMS];
#endif

// Waits for the rest of the team in this block.
NJI_INLINE void nji_meet(const nji_place &place) {
    if (NJI_WARPS == 1) __syncwarp();
    else nji_team_sync(place.team, NJI_LANES);
}

// All blocks of the cluster.
NJI_INLINE void nji_cluster_meet() {
#if NJI_SLICES > 1
    nji_cluster_sync();
#else
    __syncthreads();
#endif
}

// Before the first use of the barriers. No thread reads global memory yet.
NJI_INLINE void nji_set_up() {
    for (int i = threadIdx.x; i < NJI_STAGES * NJI_TEAMS; i += NJI_THREADS) {
        nji_barrier_init(&nji_full[0][0] + i, 1);
        nji_barrier_init(&nji_free[0][0] + i, NJI_FORWARD ? NJI_WARPS : 1);
    }
#if NJI_SLICES > 1
    if (threadIdx.x < 2 * NJI_TEAMS) nji_barrier_init(&nji_arrived[0][0] + threadIdx.x, 1);
#endif
    nji_barrier_init_fence();
    nji_cluster_meet();
}

NJI_INLINE void nji_work(const nji_problem &p, const nji_place &place);

// All that a block does.
NJI_INLINE void nji_run(const nji_problem &p) {
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); // seen to be one for a warp
    nji_set_up();
    nji_begin();
    if (warp < NJI_WORKERS / 32) {
        nji_work(p, nji_place_of(warp / NJI_WARPS, warp % NJI_WARPS));
    } else {
        const int team = threadIdx.x % 32 * NJI_FILLERS + warp - NJI_WORKERS / 32;
        if (team < NJI_TEAMS) nji_fill(p, nji_place_of(team, 0));
        __syncwarp();
    }
#if NJI_SLICES > 1
    nji_cluster_meet(); // no block ends while another may still send to it
#endif
}
