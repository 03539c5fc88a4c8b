/* Which kernels serve a descriptor: a pure function of the descriptor, device facts and preference.
   A row of the tuning table is the single home of a kernel's geometry; -D options, launches,
   workspace and SKU all come from the nji_choice made of it. */

/* What a choice may depend on. Not part of it: anything that could differ between equal devices. */
typedef struct nji_device_facts {
    int arch; /* 90 for sm_90 */
    int multiprocessors;
} nji_device_facts;

typedef enum nji_family {
    NJI_ROWS,   /* a row in the registers of one block or cluster: norm_rows.cu */
    NJI_SPLIT,  /* a row over several blocks, in two kernels: norm_rows.cu */
    NJI_TILES,  /* neighbouring rows adjacent, columns strided: norm_tiles.cu */
    NJI_RING,   /* rows pass through a ring in shared memory: norm_ring.cuh */
    NJI_STRIDED /* any strides: norm_strided.cu */
} nji_family;

/* Geometry within a row depends on direction, element size, cols and arch alone, never on rows:
   that is what makes y and dx batch-invariant. The first row that fits is taken. */
typedef struct nji_tuning {
    int forward;       /* 1 or 0 */
    int element_bytes; /* at most */
    int min_arch;
    int max_access; /* bytes of x that one access can move: 16, or less where cols do not divide */
    int64_t max_cols;
    int elements;   /* columns of a slice that one thread keeps, at most */
    int max_lanes;  /* threads that share a slice: 32 = within a warp, else up to a block */
    int threads;    /* of a block, when max_lanes is 32 */
    int max_slices; /* of a cluster; 1 = no clusters */
    int resident;   /* threads that a multiprocessor holds: launch bound, and grid of a backward */
    int prefetch;   /* load the next row while working on one */
    int ahead;      /* ask the L2 cache for the row that many steps ahead; 0 = do not */
    int depth;      /* forward, within a warp: rows that a thread loads at once, else 1 */
} nji_tuning;

#define NJI_ANY_COLS INT64_MAX

/* Measured reasons: ptx_src/DIARY.md. */
/* clang-format off */
static const nji_tuning nji_tuning_table[] = {
    /* fwd bytes arch access cols elements lanes threads slices resident prefetch ahead depth */
    {1, 2, 0, 16, 256, 8, 32, 128, 1, 1536, 0, 0, 1},
    {1, 2, 90, 16, 1024, 32, 32, 256, 1, 1024, 0, 0, 1},
    {1, 2, 0, 16, 1024, 32, 32, 256, 1, 768, 0, 0, 1},
    {1, 2, 0, 2, 8192, 32, 512, 0, 1, 768, 0, 0, 1},
    {1, 2, 0, 2, 16384, 32, 512, 0, 1, 832, 0, 0, 1},
    {1, 2, 0, 16, 8192, 32, 512, 0, 1, 1024, 0, 0, 1},
    {1, 2, 0, 16, 12288, 24, 512, 0, 1, 1024, 0, 0, 1},
    {1, 2, 0, 16, 16384, 32, 512, 0, 1, 1024, 0, 0, 1},
    {1, 2, 90, 16, 65536, 16, 512, 0, 8, 1024, 0, 0, 1},
    {1, 2, 90, 16, NJI_ANY_COLS, 32, 512, 0, 8, 512, 0, 0, 1},
    {1, 2, 0, 16, NJI_ANY_COLS, 16, 512, 0, 1, 1024, 0, 0, 1},
    {1, 4, 0, 16, 128, 4, 32, 128, 1, 1536, 0, 0, 1},
    {1, 4, 0, 16, 512, 16, 32, 256, 1, 1024, 0, 0, 1},
    {1, 4, 0, 16, 8192, 16, 512, 0, 1, 1024, 0, 0, 1},
    {1, 4, 0, 4, 16384, 32, 512, 0, 1, 832, 0, 0, 1},
    {1, 4, 0, 16, 16384, 32, 512, 0, 1, 1024, 0, 0, 1},
    {1, 4, 90, 16, 65536, 16, 512, 0, 8, 1024, 0, 0, 1},
    {1, 4, 90, 16, NJI_ANY_COLS, 32, 512, 0, 8, 512, 0, 0, 1},
    {1, 4, 0, 16, NJI_ANY_COLS, 16, 512, 0, 1, 1024, 0, 0, 1},
    {1, 8, 0, 16, 512, 16, 32, 128, 1, 512, 0, 0, 1},
    {1, 8, 90, 16, NJI_ANY_COLS, 16, 512, 0, 8, 512, 0, 0, 1},
    {1, 8, 0, 16, NJI_ANY_COLS, 16, 512, 0, 1, 512, 0, 0, 1},
    {0, 2, 0, 16, 256, 8, 32, 256, 1, 1024, 0, 0, 1},
    {0, 2, 0, 16, 768, 24, 32, 64, 1, 256, 1, 0, 1},
    {0, 2, 0, 16, 1024, 16, 512, 0, 1, 512, 1, 0, 1},
    {0, 2, 0, 16, 4096, 24, 512, 0, 1, 384, 1, 0, 1},
    {0, 2, 90, 2, 8192, 16, 512, 0, 1, 512, 0, 2, 1},
    {0, 2, 90, 4, 16384, 8, 1024, 0, 8, 1024, 0, 3, 1},
    {0, 2, 0, 16, 6144, 16, 512, 0, 1, 384, 1, 0, 1},
    {0, 2, 0, 16, 8192, 24, 512, 0, 1, 384, 1, 0, 1},
    {0, 2, 0, 2, NJI_ANY_COLS, 16, 256, 0, 1, 512, 0, 2, 1},
    {0, 2, 100, 16, 16384, 24, 352, 0, 8, 384, 1, 0, 1},
    {0, 2, 0, 16, 12288, 32, 384, 0, 1, 384, 0, 0, 1},
    {0, 2, 90, 16, 16384, 24, 512, 0, 8, 384, 1, 0, 1},
    {0, 2, 0, 16, NJI_ANY_COLS, 24, 192, 0, 1, 384, 1, 0, 1},
    {0, 4, 0, 16, 128, 4, 32, 256, 1, 1024, 1, 0, 1},
    {0, 4, 0, 16, 768, 24, 32, 64, 1, 256, 1, 0, 1},
    {0, 4, 0, 16, 4096, 8, 512, 0, 1, 1024, 0, 0, 1},
    {0, 4, 90, 16, 65536, 32, 256, 0, 8, 256, 1, 0, 1},
    {0, 4, 0, 16, NJI_ANY_COLS, 16, 512, 0, 1, 512, 0, 0, 1},
    {0, 8, 0, 16, 256, 8, 32, 128, 1, 256, 1, 0, 1},
    {0, 8, 90, 16, NJI_ANY_COLS, 8, 512, 0, 8, 512, 0, 0, 1},
    {0, 8, 0, 16, NJI_ANY_COLS, 8, 512, 0, 1, 512, 0, 0, 1},
};
/* clang-format on */

/* On sm_90 and later, columns in accesses of 16 bytes. Only `elements` decides about a row's
   bits. The first row that fits is taken; past the last one the table above goes on. */
typedef struct nji_ring_tuning {
    int forward; /* 1 or 0 */
    int element_bytes;
    int64_t min_cols, max_cols;
    int elements; /* columns of a thread */
    int workers;  /* threads of a block's teams, at most */
    int slices;   /* blocks of a cluster */
    int stages;   /* rows of a team in the ring, at most */
    int keep;     /* NJI_KEEP of norm_ring.cu or norm_ring_forward.cu */
} nji_ring_tuning;

/* clang-format off */
static const nji_ring_tuning nji_ring_table[] = {
    /* fwd bytes min_cols max_cols elements workers slices stages keep */
    {1, 2, 1025, 2048, 32, 512, 1, 6, 5},
    {1, 2, 2049, 16384, 32, 512, 1, 4, 5},
    {1, 2, 16385, 32768, 32, 512, 2, 4, 5},
    {1, 2, 32769, 65536, 32, 512, 4, 4, 5},
    {1, 4, 1025, 8192, 16, 512, 1, 4, 1},
    {1, 4, 8193, 16384, 16, 512, 2, 4, 1},
    {1, 4, 16385, 32768, 16, 512, 4, 4, 1},
    {1, 4, 32769, 65536, 16, 512, 8, 4, 1},
    {0, 2, 513, 768, 24, 256, 1, 3, 2},
    {0, 2, 769, 2048, 16, 512, 1, 3, 2},
    {0, 2, 2049, 6144, 16, 512, 2, 3, 2},
    {0, 2, 6145, 8192, 16, 512, 4, 3, 2},
    {0, 2, 8193, 12288, 24, 384, 4, 3, 1},
    {0, 2, 12289, 16384, 16, 512, 4, 3, 2},
    {0, 2, 16385, 65536, 16, 512, 8, 3, 2},
    {0, 4, 513, 4096, 16, 256, 1, 4, 2},
    {0, 4, 4097, 8192, 16, 256, 2, 4, 2},
    {0, 4, 8193, 16384, 16, 384, 4, 3, 2},
    {0, 4, 16385, 65536, 16, 512, 8, 3, 2},
};
/* clang-format on */

/* Everything that launches and compiles a descriptor's kernels. A plan has two: one for aligned
   operands in the descriptor's own layout, and the loose one for those that it does not take. */
typedef struct nji_choice {
    nji_family family; /* of the fast kernels; STRIDED when there are none */
    int forward;
    int loose; /* columns of any stride */
    int vec; /* elements of one access; operands must be aligned to it */
    int lanes, chunks,
        threads; /* threads along a row (tiles: along rows); accesses each; of a block */
    int slices, cluster;
    int blocks; /* per multiprocessor, at least */
    int prefetch, ahead, depth;
    int workers, keep; /* ring */
    int alone;         /* ring: one cluster does it all */
    int stages;        /* ring: rows of a team; tiles: tiles, in shared memory */
    int shared_bytes;  /* of a block, beside what the kernel declares */
    int parts;         /* most partial gradients of the fast kernels; 0 = none wanted */
    int strided_parts; /* the same for the strided kernels */
    int64_t partial_bytes, sums_bytes; /* of the workspace, partials first */
} nji_choice;

static int nji_accumulator_bytes(const nj_desc *desc) {
    return desc->dtype == NJ_F64 ? 8 : 4;
}

static int nji_wants_params(const nj_desc *desc) {
    return (desc->grads & (NJ_GRAD_DGAMMA | NJ_GRAD_DBETA)) != 0;
}

static int nji_round_up(int value, int multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

static int nji_power_of_two_above(int value) {
    int power = 1;
    while (power < value) power *= 2;
    return power;
}

/* Elements of one access: up to 16 bytes, dividing an extent. */
static int nji_vec_of(const nj_desc *desc, int64_t extent) {
    int vec = 16 / (int)nj_dtype_size(desc->dtype);
    while (extent % vec != 0) vec /= 2;
    return vec;
}

static const nji_tuning *nji_find_tuning(const nj_desc *desc, int forward, int64_t cols, int vec,
                                         const nji_device_facts *facts) {
    int bytes = (int)nj_dtype_size(desc->dtype);
    int access = bytes * vec;
    size_t i;
    for (i = 0; i < sizeof nji_tuning_table / sizeof nji_tuning_table[0]; i++) {
        const nji_tuning *row = &nji_tuning_table[i];
        if (row->forward == forward && bytes <= row->element_bytes &&
            facts->arch >= row->min_arch && access <= row->max_access && cols <= row->max_cols) {
            return row;
        }
    }
    return NULL;
}

/* Threads that one multiprocessor of an architecture can hold (CUDA programming guide, table of
   compute capabilities). */
static int nji_most_resident(int arch) {
    if (arch < 80) return 1024;
    return arch == 80 || (arch >= 90 && arch < 110) ? 2048 : 1536;
}

/* Cuts a row of cols columns, read vec at a time, as the tuning row says. */
static void nji_cut_row(const nj_desc *desc, const nji_tuning *row, int64_t cols, int vec, int arch,
                        nji_choice *choice) {
    int64_t packs, slices;
    int per_slice, resident;
    choice->vec = vec;
    /* Narrow packs waste registers: there is no room for a second row. */
    choice->prefetch = row->prefetch && choice->vec * (int)nj_dtype_size(desc->dtype) >= 8;
    slices = nji_ceil_div(cols, (int64_t)row->elements * row->max_lanes);
    if (row->max_slices > 1 && slices > 1 && slices <= row->max_slices) {
        slices = nji_power_of_two_above((int)slices);
        choice->cluster = 1;
    }
    choice->family = slices == 1 || choice->cluster ? NJI_ROWS : NJI_SPLIT;
    choice->slices = (int)slices;
    packs = nji_ceil_div(cols, choice->vec);
    per_slice = (int)nji_ceil_div(packs, slices);
    if (row->max_lanes == 32) {
        /* Forward, fewer lanes with more packs each: a row's fixed cost is each lane's. */
        int least = row->forward && choice->vec * (int)nj_dtype_size(desc->dtype) == 16
                        ? (int)nji_ceil_div(per_slice, row->elements / choice->vec)
                        : per_slice;
        choice->lanes = (int)nji_min_i64(32, nji_power_of_two_above(least));
        choice->chunks = (int)nji_ceil_div(per_slice, choice->lanes);
        choice->threads = row->threads;
    } else {
        choice->chunks = row->elements / choice->vec;
        choice->lanes = nji_round_up((int)nji_ceil_div(per_slice, choice->chunks), 32);
        choice->threads = choice->lanes;
    }
    choice->ahead = row->ahead;
    choice->depth = choice->lanes <= 32 && !choice->cluster ? row->depth : 1;
    resident = (int)nji_min_i64(row->resident, nji_most_resident(arch));
    choice->blocks = resident > choice->threads ? resident / choice->threads : 1;
}

/* Shared memory of a multiprocessor of an architecture; each block takes 1 KB beside its own (CUDA
   programming guide, table of compute capabilities). */
#define NJI_SHARED_RESERVED 1024

static int nji_most_shared(int arch) {
    if (arch < 80) return 64 << 10;
    if (arch == 80 || arch == 87) return 164 << 10;
    return arch >= 90 && arch < 120 ? 228 << 10 : 100 << 10;
}

/* Most warps of a ring kernel that fill it: they take turns with the teams. */
#define NJI_RING_FILLERS 4

/* A forward team of one warp fills its own slots. */
static int nji_ring_fillers(const nji_choice *choice, int teams) {
    if (choice->forward && choice->lanes == 32 && choice->slices == 1) return 0;
    return teams < NJI_RING_FILLERS ? teams : NJI_RING_FILLERS;
}

/* Most shared memory that a ring kernel declares itself. */
static int nji_ring_declared(const nji_choice *choice) {
    return choice->forward ? 4608 : 2560;
}

/* Fills in the geometry that a row of the table gives with so many workers (at most) and slices; a
   row of x has the same bits with any of either. Returns 0 where the ring does not fit. */
static int nji_fit_ring(const nji_ring_tuning *row, int64_t cols, int arch, int workers, int slices,
                        nji_choice *choice) {
    int room = nji_most_shared(arch) - NJI_SHARED_RESERVED - nji_ring_declared(choice), teams;
    int64_t warps = nji_ceil_div(cols, (int64_t)row->elements * 32), stage_bytes;
    choice->slices = slices;
    choice->lanes = 32 * (int)nji_ceil_div(warps, slices);
    teams = workers > choice->lanes ? workers / choice->lanes : 1;
    choice->workers = teams * choice->lanes;
    choice->threads = choice->workers + 32 * nji_ring_fillers(choice, teams);
    stage_bytes = (int64_t)row->elements * choice->workers * row->element_bytes;
    if (!choice->forward) stage_bytes *= 2; /* x and dy */
    choice->stages = (int)nji_min_i64(row->stages, room / stage_bytes);
    choice->family = NJI_RING;
    choice->chunks = row->elements / choice->vec;
    choice->cluster = slices > 1;
    choice->blocks = 1;
    choice->keep = row->keep;
    choice->shared_bytes = choice->stages * (int)stage_bytes;
    return choice->stages >= 2 && choice->threads <= 1024;
}

static const nji_ring_tuning *nji_find_ring(const nj_desc *desc, int64_t cols, int arch) {
    int size = (int)nj_dtype_size(desc->dtype);
    size_t i;
    if (arch < 90 || size * nji_vec_of(desc, cols) != 16) return NULL;
    for (i = 0; i < sizeof nji_ring_table / sizeof nji_ring_table[0]; i++) {
        const nji_ring_tuning *row = &nji_ring_table[i];
        if (row->forward == nji_is_forward(desc) && size == row->element_bytes &&
            cols >= row->min_cols && cols <= row->max_cols) {
            return row;
        }
    }
    return NULL;
}

/* Bytes of x, dy and dx that a block moves in the time of a launch. */
#define NJI_RING_LAUNCH_BYTES (96 << 10)
#define NJI_RING_MOST_SLICES 8 /* every device has clusters of 8 */

/* Few rows go through one cluster, which then needs no second launch to add up its gradients.
   Returns its slices; 0 when they are too many. */
static int nji_ring_alone(const nj_desc *desc, const nji_ring_tuning *row, int64_t rows,
                          int64_t cols) {
    int64_t bytes = cols * 3 * row->element_bytes, warps;
    int slices = 1;
    if (!nji_wants_params(desc)) return 0;
    warps = nji_ceil_div(cols, (int64_t)row->elements * 32);
    while (slices < NJI_RING_MOST_SLICES && slices < warps) slices *= 2;
    return rows <= NJI_RING_LAUNCH_BYTES * slices / bytes ? slices : 0;
}

/* Returns 0 where no row of the table fits. */
static int nji_cut_ring(const nj_desc *desc, int64_t rows, int64_t cols, int arch,
                        nji_choice *choice) {
    const nji_ring_tuning *row = nji_find_ring(desc, cols, arch);
    nji_choice cut = *choice;
    int alone;
    if (!row) return 0;
    cut.vec = nji_vec_of(desc, cols);
    alone = nji_ring_alone(desc, row, rows, cols);
    cut.alone = alone > 0;
    if (!nji_fit_ring(row, cols, arch, row->workers, alone ? alone : row->slices, &cut)) return 0;
    *choice = cut;
    return 1;
}

/* The last axis that has any extent is not normalized: neighbouring rows are adjacent in a packed
   tensor. *run counts them. */
static int nji_is_channels_first(const nj_desc *desc, int64_t *run) {
    int axis = desc->rank - 1;
    *run = 1;
    for (; axis >= 0 && (desc->shape[axis] == 1 || !nji_is_normalized(desc, axis)); axis--) {
        *run *= desc->shape[axis];
    }
    return *run > 1;
}

/* Tiles: most bytes of neighbouring rows that a warp reads of a column, elements that a thread has
   of a tile, threads of a multiprocessor. From registers and bytes under way; not measured yet. */
#define NJI_TILE_RUN_BYTES 128
#define NJI_TILE_THREAD_ELEMENTS 128
#define NJI_TILE_RESIDENT 512

/* Registers that a thread of the tiles kernels needs: parameters and their gradients for each
   column, statistics and sums for each row, the rest. */
static int nji_tile_registers(const nj_desc *desc, const nji_choice *choice) {
    int words = nji_accumulator_bytes(desc) / 4;
    int rest = words == 1 ? 0 : 16; /* pairs of registers leave gaps */
    return choice->forward ? words * (2 * choice->chunks + 3 * choice->vec) + 44 + rest
                           : words * (3 * choice->chunks + 5 * choice->vec) + 38 + rest;
}

/* Shared memory of a block of the tiles kernels that they declare themselves. */
static int nji_tile_static_bytes(const nj_desc *desc, const nji_choice *choice) {
    int warps = choice->threads / 32, tile = choice->lanes * choice->vec;
    int slots = choice->stages > 0 ? choice->stages : 1;
    int head = choice->forward ? (int)nj_dtype_size(desc->dtype)
                               : 2 * (int)nj_dtype_size(desc->stat_dtype);
    return warps * tile * (slots * head + 4 * nji_accumulator_bytes(desc));
}

/* Fills in what follows from lanes, threads and stages. Returns how many tiles a multiprocessor
   then has in shared memory; 0: the kernel would not fit. */
static int nji_fit_tiles(const nj_desc *desc, int64_t cols, int arch, nji_choice *choice) {
    int col_lanes = choice->threads / choice->lanes;
    int slots = choice->stages > 0 ? choice->stages : 1;
    int operands = choice->forward || desc->grads == NJ_GRAD_DBETA ? 1 : 2, by_registers;
    int64_t ring;
    choice->chunks = (int)nji_ceil_div(cols, col_lanes);
    col_lanes = (int)nji_ceil_div(cols, choice->chunks); /* fewer may do */
    choice->threads = nji_round_up(col_lanes * choice->lanes, 32);
    if (choice->chunks * choice->vec > NJI_TILE_THREAD_ELEMENTS || choice->chunks > 24) return 0;
    ring = (int64_t)slots * operands * choice->threads * choice->chunks * choice->vec *
           (int)nj_dtype_size(desc->dtype);
    if (ring > nji_most_shared(arch)) return 0;
    choice->shared_bytes = (int)ring;
    by_registers =
        65536 / (nji_round_up(nji_tile_registers(desc, choice), 8) * choice->threads);
    choice->blocks = nji_most_shared(arch) / (choice->shared_bytes + NJI_SHARED_RESERVED +
                                              nji_tile_static_bytes(desc, choice));
    choice->blocks = (int)nji_min_i64(choice->blocks, by_registers);
    choice->blocks = (int)nji_min_i64(choice->blocks, NJI_TILE_RESIDENT / choice->threads);
    return choice->blocks * slots;
}

/* Runs as long as they may be while three tiles fit; with many columns shorter ones, then fewer
   tiles. As few threads as a tile allows: each tile costs a thread some 200 instructions. */
static void nji_cut_tiles(const nj_desc *desc, int64_t run, int64_t cols, int arch,
                          nji_choice *choice) {
    int size = (int)nj_dtype_size(desc->dtype), wanted, run_bytes, threads;
    nji_choice cut = *choice;
    cut.family = NJI_TILES;
    cut.slices = 1;
    cut.vec = nji_vec_of(desc, run);
    cut.stages = arch >= 80 && cut.vec * size >= 4; /* copies of 4 bytes and more run on alone */
    for (wanted = 3; wanted >= 1; wanted -= 2) {
        for (run_bytes = NJI_TILE_RUN_BYTES; run_bytes >= cut.vec * size; run_bytes /= 2) {
            cut.lanes = (int)nji_min_i64(32, run_bytes / (cut.vec * size));
            for (threads = 32; threads <= NJI_TILE_RESIDENT; threads *= 2) {
                cut.threads = threads;
                if (nji_fit_tiles(desc, cols, arch, &cut) < wanted) continue;
                *choice = cut;
                return;
            }
        }
    }
}

/* Rows that a block of the fast kernels works on at a time. */
static int nji_block_rows(const nji_choice *choice) {
    if (choice->family == NJI_TILES) return choice->lanes * choice->vec;
    if (choice->family == NJI_RING) return choice->workers / choice->lanes;
    return choice->threads / choice->lanes * choice->depth;
}

/* Blocks that walk over the rows at a time, in clusters. A cluster lies within a part of the
   device: where these are no multiples of its size, some multiprocessors stay idle (30 clusters of
   4 on 132 of them, 15 of 8). A cluster too many would run alone at the end. */
static int nji_resident_clusters(const nji_choice *choice, const nji_device_facts *facts) {
    int blocks = facts->multiprocessors * choice->blocks;
    if (choice->alone) return 1;
    if (choice->slices > 2) blocks = blocks / 11 * 10;
    return blocks / choice->slices > 1 ? blocks / choice->slices : 1;
}

static int64_t nji_clamp(int64_t value, int64_t low, int64_t high) {
    return value < low ? low : value > high ? high : value;
}

/* Threads of a strided block along rows; the rest go along columns. From cols and layout alone. */
#define NJI_STRIDED_FAST_ROWS 32

static int nji_strided_row_lanes(int64_t cols, int rows_fast) {
    if (rows_fast) return NJI_STRIDED_FAST_ROWS;
    return NJI_STRIDED_THREADS /
           nji_power_of_two_above((int)nji_clamp(cols, 1, NJI_STRIDED_THREADS));
}

/* The parts kernel gives neighbouring columns to a warp, or a few columns to neighbouring rows. */
static int nji_parts_row_lanes(int rows_fast) {
    return rows_fast ? NJI_STRIDED_FAST_ROWS : NJI_STRIDED_THREADS / 32;
}

/* Most parts that the strided kernels make: enough blocks to fill the device, each with rows to
 * add. */
static int64_t nji_strided_parts(int64_t rows, int64_t cols, const nji_device_facts *facts) {
    int64_t tiles = nji_ceil_div(cols, 32);
    return nji_clamp(16 * facts->multiprocessors / tiles, 1, nji_clamp(rows / 64, 1, 4096));
}

#define NJI_WORKSPACE_ALIGNMENT 256

/* Bytes of workspace: the partials, then the split kernels' sums. */
static int64_t nji_sums_offset(const nji_choice *choice) {
    return nji_ceil_div(choice->partial_bytes, NJI_WORKSPACE_ALIGNMENT) * NJI_WORKSPACE_ALIGNMENT;
}

static int64_t nji_workspace_of(const nji_choice *choice) {
    return choice->sums_bytes ? nji_sums_offset(choice) + choice->sums_bytes
                              : choice->partial_bytes;
}

/* Parts of the parameter gradients, within the workspace that the caller allows. */
static nj_status nji_choose_parts(const nj_desc *desc, int64_t rows, int64_t cols,
                                  const nji_device_facts *facts, const nj_preference *pref,
                                  nji_choice *choice, const char *call) {
    int64_t part = nji_wants_params(desc) && rows > 0 ? cols * 2 * nji_accumulator_bytes(desc) : 0;
    int64_t most = INT32_MAX, parts = 0, strided;
    uint64_t limit = pref->max_workspace_bytes, least;
    choice->partial_bytes = part; /* of one part: the least that will do */
    least = (uint64_t)nji_workspace_of(choice);
    if (limit && limit < least) {
        return nji_fail_sized(NJ_UNSUPPORTED, least, limit,
                              "%s: pref.max_workspace_bytes = %llu: this shape needs %llu bytes",
                              call, (unsigned long long)limit, (unsigned long long)least);
    }
    if (part == 0) return NJ_OK;
    if (limit) {
        uint64_t room = limit - (uint64_t)choice->sums_bytes;
        if (choice->sums_bytes) room -= room % NJI_WORKSPACE_ALIGNMENT;
        most = (int64_t)(room / (uint64_t)part);
    }
    if (choice->family != NJI_STRIDED) {
        parts = nji_clamp(nji_resident_clusters(choice, facts), 1, most);
        parts = nji_min_i64(parts, nji_ceil_div(rows, nji_block_rows(choice)));
    }
    strided = nji_clamp(nji_strided_parts(rows, cols, facts), 1, most);
    choice->parts = (int)parts;
    choice->strided_parts = (int)strided;
    choice->partial_bytes = part * (parts > strided ? parts : strided);
    return NJ_OK;
}

/* Columns past which 32-bit column numbers or the size of the workspace would give out. */
#define NJI_MAX_ROWS_COLS (1ll << 28)
#define NJI_MAX_COLS (1ll << 44)

static void nji_cut_fast(const nj_desc *desc, int64_t rows, int64_t cols,
                         const nji_device_facts *facts, nji_choice *choice) {
    int vec = nji_vec_of(desc, cols);
    const nji_tuning *row = nji_find_tuning(desc, choice->forward, cols, vec, facts);
    int64_t run;
    if (nji_is_channels_first(desc, &run)) {
        nji_cut_tiles(desc, run, cols, facts->arch, choice);
    } else if (row && !nji_cut_ring(desc, rows, cols, facts->arch, choice)) {
        nji_cut_row(desc, row, cols, vec, facts->arch, choice);
    }
}

/* Steps ahead at which the L2 cache is asked for a row that the registers have no room for. */
#define NJI_LOOSE_AHEAD 2

static void nji_cut_loose(const nj_desc *desc, int64_t cols, const nji_device_facts *facts,
                          nji_choice *choice) {
    const nji_tuning *row = nji_find_tuning(desc, choice->forward, cols, 1, facts);
    if (!row) return;
    nji_cut_row(desc, row, cols, 1, facts->arch, choice);
    if (row->prefetch && !choice->prefetch) choice->ahead = NJI_LOOSE_AHEAD;
}

/* Bytes that the split kernels keep for their sums. */
static int64_t nji_sums_of(const nj_desc *desc, int64_t rows, const nji_choice *choice) {
    if (choice->family != NJI_SPLIT) return 0;
    if (!choice->forward && !(desc->grads & NJ_GRAD_DX)) return 0;
    /* 2 accumulators for each slice of some thousand elements: far from overflow. */
    return rows * choice->slices * 2 * nji_accumulator_bytes(desc);
}

/* Both choices, but for their parts. They have the same room for sums: the least workspace of one
   is that of the other. */
static void nji_cut(const nj_desc *desc, int64_t rows, int64_t cols, const nji_device_facts *facts,
                    nji_choice *fast, nji_choice *loose) {
    memset(fast, 0, sizeof *fast);
    fast->forward = nji_is_forward(desc);
    fast->family = NJI_STRIDED;
    *loose = *fast;
    loose->loose = 1;
    if (cols == 0 || cols > NJI_MAX_ROWS_COLS) return;
    nji_cut_fast(desc, rows, cols, facts, fast);
    nji_cut_loose(desc, cols, facts, loose);
    fast->sums_bytes = nji_sums_of(desc, rows, fast);
    loose->sums_bytes = nji_sums_of(desc, rows, loose);
    if (fast->sums_bytes < loose->sums_bytes) fast->sums_bytes = loose->sums_bytes;
    loose->sums_bytes = fast->sums_bytes;
}

static nj_status nji_choose(const nj_desc *desc, int64_t rows, int64_t cols,
                            const nji_device_facts *facts, const nj_preference *pref,
                            nji_choice *choice, const char *call) {
    nji_choice loose;
    nji_cut(desc, rows, cols, facts, choice, &loose);
    if (cols > NJI_MAX_COLS && nji_wants_params(desc)) {
        return nji_fail(NJ_UNSUPPORTED,
                        "%s: desc.shape: %lld columns: at most %lld with dgamma or dbeta", call,
                        (long long)cols, NJI_MAX_COLS);
    }
    return nji_choose_parts(desc, rows, cols, facts, pref, choice, call);
}

/* The loose choice, where nji_choose has made the other. */
static nj_status nji_choose_loose(const nj_desc *desc, int64_t rows, int64_t cols,
                                  const nji_device_facts *facts, const nj_preference *pref,
                                  nji_choice *choice, const char *call) {
    nji_choice fast;
    nji_cut(desc, rows, cols, facts, &fast, choice);
    return nji_choose_parts(desc, rows, cols, facts, pref, choice, call);
}

/* Makes the nth variation of a choice that leaves the bits of rows alone. Returns 0 where it is
   none or does not fit, -1 past the last. */
static int nji_vary_rows(const nji_device_facts *facts, int nth, nji_choice *choice) {
    switch (nth) {
    case 0: choice->blocks *= 2; break;
    case 1: choice->blocks /= 2; break;
    case 2: choice->prefetch = !choice->prefetch; break;
    default: return -1;
    }
    if (nth == 2 && choice->forward) return 0;
    return choice->blocks >= 1 &&
           choice->blocks * choice->threads <= nji_most_resident(facts->arch);
}

/* Past 4 slices a device can hold fewer clusters than its facts tell: not tried. */
static int nji_vary_ring(const nj_desc *desc, int64_t cols, const nji_device_facts *facts, int nth,
                         nji_choice *choice) {
    const nji_ring_tuning *row = nji_find_ring(desc, cols, facts->arch);
    int slices = row->slices, workers = row->workers;
    switch (nth) {
    case 0: slices *= 2; break;
    case 1: slices /= 2; break;
    case 2: workers /= 2; break;
    default: return -1;
    }
    if (choice->alone || slices < 1 || (slices > 4 && slices > row->slices)) return 0;
    return nji_fit_ring(row, cols, facts->arch, workers, slices, choice) &&
           choice->workers <= workers;
}

/* The default choice, then others whose rows have the same bits and that may be faster on some
   device: what NJ_TUNE_MEASURE chooses from. Returns how many there are, at most capacity. */
static int nji_alternatives(const nj_desc *desc, int64_t rows, int64_t cols,
                            const nji_device_facts *facts, const nj_preference *pref,
                            nji_choice *out, int capacity) {
    static const char call[] = "nji_alternatives";
    int count = 1, nth, fits = 0;
    if (nji_choose(desc, rows, cols, facts, pref, &out[0], call) != NJ_OK) return 0;
    for (nth = 0; fits >= 0 && count < capacity; nth++) {
        nji_choice *other = &out[count];
        *other = out[0];
        if (other->family == NJI_ROWS) fits = nji_vary_rows(facts, nth, other);
        else if (other->family == NJI_RING) fits = nji_vary_ring(desc, cols, facts, nth, other);
        else fits = -1;
        if (fits > 0 && nji_choose_parts(desc, rows, cols, facts, pref, other, call) == NJ_OK)
            count++;
    }
    return count;
}

/* ---- options for the compiler --------------------------------------------------------------- */

typedef struct nji_options {
    char text[24][48];
    const char *list[24];
    int count;
} nji_options;

NJI_PRINTF(2, 3)
static void nji_add_option(nji_options *options, const char *format, ...) {
    va_list arguments;
    char *text = options->text[options->count];
    va_start(arguments, format);
    vsnprintf(text, sizeof options->text[0], format, arguments);
    va_end(arguments);
    options->list[options->count++] = text;
}

/* Type names of ptx_src/nj_device.cuh. */
static const char *nji_device_type(nj_dtype dtype) {
    static const char *const name[] = {"", "nji_f16", "nji_bf16", "float", "double"};
    return name[dtype];
}

/* For norm_rows.cu, norm_tiles.cu and the ring: all that the descriptor's columns and types fix. */
static void nji_fast_options(const nj_desc *desc, int64_t cols, const nji_choice *choice,
                             nji_options *options) {
    options->count = 0;
    nji_add_option(options, "-DNJI_X=%s", nji_device_type(desc->dtype));
    nji_add_option(options, "-DNJI_P=%s", nji_device_type(desc->param_dtype));
    nji_add_option(options, "-DNJI_STAT_CODE=%d", (int)desc->stat_dtype);
    nji_add_option(options, "-DNJI_FORWARD=%d", choice->forward);
    nji_add_option(options, "-DNJI_HAS_GAMMA=%d", (int)desc->has_gamma);
    nji_add_option(options, "-DNJI_HAS_BETA=%d", (int)(desc->has_beta && choice->forward));
    nji_add_option(options, "-DNJI_GRADS=%u", (unsigned)desc->grads);
    nji_add_option(options, "-DNJI_ACCUMULATE=%u", (unsigned)(desc->accumulate & NJ_GRAD_DX));
    nji_add_option(options, "-DNJI_COLS=%lld", (long long)cols);
    nji_add_option(options, "-DNJI_VEC=%d", choice->vec);
    nji_add_option(options, "-DNJI_CHUNKS=%d", choice->chunks);
    if (choice->family == NJI_RING) {
        nji_add_option(options, "-DNJI_LANES=%d", choice->lanes);
        nji_add_option(options, "-DNJI_WORKERS=%d", choice->workers);
        nji_add_option(options, "-DNJI_THREADS=%d", choice->threads);
        nji_add_option(options, "-DNJI_SLICES=%d", choice->slices);
        nji_add_option(options, "-DNJI_STAGES=%d", choice->stages);
        nji_add_option(options, "-DNJI_KEEP=%d", choice->keep);
        return;
    }
    nji_add_option(options, "-DNJI_BLOCKS=%d", choice->blocks);
    if (choice->family == NJI_TILES) {
        nji_add_option(options, "-DNJI_ROW_LANES=%d", choice->lanes);
        nji_add_option(options, "-DNJI_COL_LANES=%d", choice->threads / choice->lanes);
        nji_add_option(options, "-DNJI_STAGES=%d", choice->stages);
    } else {
        nji_add_option(options, "-DNJI_LANES=%d", choice->lanes);
        nji_add_option(options, "-DNJI_THREADS=%d", choice->threads);
        nji_add_option(options, "-DNJI_SLICES=%d", choice->slices);
        nji_add_option(options, "-DNJI_CLUSTER=%d", choice->cluster);
        nji_add_option(options, "-DNJI_DEPTH=%d", choice->depth);
        nji_add_option(options, "-DNJI_PREFETCH=%d", choice->prefetch);
        nji_add_option(options, "-DNJI_AHEAD=%d", choice->ahead);
        nji_add_option(options, "-DNJI_LOOSE=%d", choice->loose);
    }
}

/* For norm_strided.cu: shapes and strides are arguments; types and direction are fixed. */
static void nji_strided_options(const nj_desc *desc, const nji_choice *choice,
                                nji_options *options) {
    options->count = 0;
    nji_add_option(options, "-DNJI_X=%s", nji_device_type(desc->dtype));
    nji_add_option(options, "-DNJI_PARAM_CODE=%d", (int)desc->param_dtype);
    nji_add_option(options, "-DNJI_STAT_CODE=%d", (int)desc->stat_dtype);
    nji_add_option(options, "-DNJI_FORWARD=%d", choice->forward);
    nji_add_option(options, "-DNJI_BACKWARD=%d", !choice->forward);
}
