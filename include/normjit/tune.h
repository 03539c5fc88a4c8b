/* Measured selection: the candidates of a descriptor run on operands made up in the caller's
   scratch memory, and the fastest is remembered. */

#define NJI_TUNE_CANDIDATES 4
#define NJI_TUNE_ROUNDS 5    /* in each all candidates take their turn: a drifting clock hits all */
#define NJI_TUNE_LAUNCHES 10 /* timed as one: an event resolves half a microsecond */
#define NJI_TUNE_MARGIN 0.98f /* another must stay below this share of the first one's time */
#define NJI_TUNE_WAVES 4      /* rows that fill the device that often, or all */
#define NJI_TUNE_BYTES ((int64_t)256 << 20) /* operands that no device's cache holds */

/* The candidates, and operands for them: sets that take turns, each with all but the parameters. */
typedef struct nji_trial {
    nji_choice choice[NJI_TUNE_CANDIDATES];
    int count;
    nj_desc desc; /* the plan's; its shape is that of a set */
    int64_t cols;
    int64_t run;       /* rows that stay together: neighbours of the tiles kernels */
    int64_t row_bytes; /* of a set, for each row */
    int64_t workspace_bytes, shared_bytes; /* for every candidate; with the parameters */
    int64_t least_rows, enough_rows;
    int64_t rows, sets; /* what the scratch memory is cut into */
} nji_trial;

/* ---- operands ------------------------------------------------------------------------------- */

static int64_t nji_tune_padded(int64_t bytes) {
    return nji_ceil_div(bytes, NJI_WORKSPACE_ALIGNMENT) * NJI_WORKSPACE_ALIGNMENT;
}

#define NJI_TUNE_PADDING (10 * NJI_WORKSPACE_ALIGNMENT) /* at most, between a set's operands */

#define NJI_TUNE_TOO_MUCH (INT64_MAX / 32) /* no device has it; ten times it are no overflow */

static int64_t nji_trial_set_bytes(const nji_trial *trial, int64_t rows) {
    int64_t bytes;
    if (!nji_mul_i64(rows, trial->row_bytes, &bytes) || bytes > NJI_TUNE_TOO_MUCH)
        return NJI_TUNE_TOO_MUCH;
    return nji_tune_padded(bytes) + NJI_TUNE_PADDING;
}

static int64_t nji_trial_bytes(const nji_trial *trial, int64_t rows, int64_t sets) {
    return trial->shared_bytes + sets * nji_trial_set_bytes(trial, rows);
}

static int64_t nji_trial_least(const nji_trial *trial) {
    return nji_trial_bytes(trial, trial->least_rows, 1);
}

static int64_t nji_trial_enough(const nji_trial *trial) {
    int64_t set = nji_trial_set_bytes(trial, trial->enough_rows);
    int64_t sets = nji_clamp(nji_ceil_div(NJI_TUNE_BYTES, set), 1, NJI_TUNE_LAUNCHES);
    return nji_trial_bytes(trial, trial->enough_rows, sets);
}

/* Packed operands for so many rows, which the kernels take like those of a run. */
static void nji_trial_views(nji_trial *trial, int64_t rows, void *address, nj_args *args,
                            nji_views *views) {
    trial->desc.rank = 3;
    trial->desc.shape[0] = rows / trial->run;
    trial->desc.shape[1] = trial->cols;
    trial->desc.shape[2] = trial->run;
    trial->desc.norm_axes = 1u << 1;
    nji_packed_args(&trial->desc, address, args);
    nji_list_views(&trial->desc, args, views);
}

/* Bytes of an operand that a set of so many rows has. */
static int64_t nji_trial_operand(const nji_trial *trial, const nji_view *view, int64_t rows) {
    int64_t count = view->kind == NJI_PARAM ? trial->cols : rows;
    return view->size * (view->kind == NJI_FULL ? count * trial->cols : count);
}

/* Candidates and sizes; count is 1 where there is nothing to choose from. */
static void nji_trial_make(nji_trial *trial, const nji_cuda *cuda, const nji_cuda_plan *plan,
                           int64_t rows, int64_t cols, const nj_preference *pref) {
    nj_args args;
    nji_views views;
    int64_t run = 1;
    int i;
    memset(trial, 0, sizeof *trial);
    trial->count = 1;
    trial->choice[0] = plan->choice;
    if (!nji_cuda_compiles(cuda) || plan->choice.family == NJI_STRIDED || rows == 0) return;
    trial->count = nji_alternatives(&plan->desc, rows, cols, &cuda->facts, pref, trial->choice,
                                    NJI_TUNE_CANDIDATES);
    if (plan->choice.family == NJI_TILES) nji_is_channels_first(&plan->desc, &run);
    trial->desc = plan->desc;
    trial->cols = cols;
    trial->run = run;
    nji_trial_views(trial, run, NULL, &args, &views);
    for (i = 0; i < views.count; i++) {
        int64_t bytes = nji_trial_operand(trial, &views.view[i], 1);
        if (views.view[i].kind == NJI_PARAM) trial->shared_bytes += nji_tune_padded(bytes);
        else trial->row_bytes += bytes;
    }
    for (i = 0; i < trial->count; i++) {
        const nji_choice *choice = &trial->choice[i];
        int64_t workspace = nji_tune_padded(nji_workspace_of(choice));
        int64_t wave = (int64_t)cuda->facts.multiprocessors * choice->blocks *
                       nji_block_rows(choice) / choice->slices;
        if (workspace > trial->workspace_bytes) trial->workspace_bytes = workspace;
        if (wave * NJI_TUNE_WAVES > trial->least_rows) trial->least_rows = wave * NJI_TUNE_WAVES;
    }
    trial->shared_bytes += trial->workspace_bytes;
    trial->least_rows = nji_min_i64(nji_ceil_div(trial->least_rows, run) * run, rows);
    trial->enough_rows = nji_ceil_div(NJI_TUNE_BYTES / trial->row_bytes + 1, run) * run;
    trial->enough_rows = nji_clamp(trial->enough_rows, trial->least_rows, rows);
}

/* Cuts the scratch memory into sets: as many rows as it holds, then as many sets. */
static void nji_trial_cut(nji_trial *trial, uint64_t bytes) {
    int64_t enough = nji_trial_enough(trial), room;
    room = (bytes < (uint64_t)enough ? (int64_t)bytes : enough) - trial->shared_bytes;
    trial->rows = (room - NJI_TUNE_PADDING - NJI_WORKSPACE_ALIGNMENT) / trial->row_bytes;
    trial->rows = nji_clamp(trial->rows, trial->least_rows, trial->enough_rows);
    trial->rows -= trial->rows % trial->run;
    trial->sets =
        nji_clamp(room / nji_trial_set_bytes(trial, trial->rows), 1, NJI_TUNE_LAUNCHES);
}

static void nji_trial_bind(nji_trial *trial, int64_t set, void *scratch, nji_problem *problem) {
    char *shared = (char *)scratch + trial->workspace_bytes;
    char *own = (char *)scratch + trial->shared_bytes +
                set * nji_trial_set_bytes(trial, trial->rows);
    nj_args args;
    nji_views views;
    int i;
    nji_trial_views(trial, trial->rows, scratch, &args, &views);
    for (i = 0; i < views.count; i++) {
        nji_view *view = &views.view[i];
        char **at = view->kind == NJI_PARAM ? &shared : &own;
        view->data = *at;
        *at += nji_tune_padded(nji_trial_operand(trial, view, trial->rows));
    }
    nji_bind(&trial->desc, trial->rows, trial->cols, &views, problem);
    problem->partial = scratch;
}

/* For nj_tune_scratch_size. */
static void nji_tune_scratch(const nji_cuda *cuda, const nji_cuda_plan *plan, int64_t rows,
                             int64_t cols, const nj_preference *pref, size_t *least,
                             size_t *enough) {
    nji_trial trial;
    nji_trial_make(&trial, cuda, plan, rows, cols, pref);
    if (trial.count < 2) return;
    *least = (size_t)nji_trial_least(&trial);
    *enough = (size_t)nji_trial_enough(&trial);
}

static nj_status nji_check_scratch(const nji_trial *trial, const nj_preference *pref,
                                   const char *call) {
    uint64_t needed = (uint64_t)nji_trial_least(trial), got = pref->tune_scratch_bytes;
    if (got < needed) {
        return nji_fail_sized(NJ_WORKSPACE_TOO_SMALL, needed, got,
                              "%s: pref.tune_scratch_bytes = %llu: measuring needs %llu bytes",
                              call, (unsigned long long)got, (unsigned long long)needed);
    }
    if (!pref->tune_scratch) {
        return nji_fail(NJ_INVALID_ARGUMENT,
                        "%s: pref.tune_scratch = NULL: measuring needs %llu bytes", call,
                        (unsigned long long)needed);
    }
    if ((uintptr_t)pref->tune_scratch % NJI_WORKSPACE_ALIGNMENT != 0) {
        return nji_fail(NJ_MISALIGNED_OPERAND,
                        "%s: pref.tune_scratch = %p: must be a multiple of %d bytes", call,
                        pref->tune_scratch, NJI_WORKSPACE_ALIGNMENT);
    }
    return NJ_OK;
}

/* ---- time ----------------------------------------------------------------------------------- */

static nj_status nji_tune_status(const nji_cuda *cuda, int result, const char *function,
                                 const char *call) {
    if (nji_is_capture_error(result)) return nji_capture_fail(call);
    return result == 0 ? NJ_OK : nji_driver_fail(&cuda->driver, result, call, function);
}

typedef struct nji_stopwatch {
    const nji_cuda *cuda;
    void *stream;
    void *from, *to; /* events */
    nji_problem set[NJI_TUNE_LAUNCHES];
    int64_t sets;
} nji_stopwatch;

/* Milliseconds of a batch of launches. */
static nj_status nji_stopwatch_time(const nji_stopwatch *watch, const nji_cuda_plan *plan,
                                    float *ms, const char *call) {
    const nji_driver *driver = &watch->cuda->driver;
    nj_status status = nji_tune_status(
        watch->cuda, driver->cuEventRecord(watch->from, watch->stream), "cuEventRecord", call);
    int i;
    for (i = 0; status == NJ_OK && i < NJI_TUNE_LAUNCHES; i++) {
        nji_problem problem = watch->set[i % watch->sets];
        status = nji_cuda_run(watch->cuda, plan, &problem, watch->stream, call);
    }
    if (status != NJ_OK) return status;
    status = nji_tune_status(watch->cuda, driver->cuEventRecord(watch->to, watch->stream),
                             "cuEventRecord", call);
    if (status != NJ_OK) return status;
    status = nji_tune_status(watch->cuda, driver->cuEventSynchronize(watch->to),
                             "cuEventSynchronize", call);
    if (status != NJ_OK) return status;
    return nji_tune_status(watch->cuda, driver->cuEventElapsedTime(ms, watch->from, watch->to),
                           "cuEventElapsedTime", call);
}

/* The least time of each plan. The first round warms up. */
static nj_status nji_stopwatch_rounds(const nji_stopwatch *watch, const nji_cuda_plan *plans,
                                      int count, float *least, const char *call) {
    int round, i;
    for (round = 0; round <= NJI_TUNE_ROUNDS; round++) {
        for (i = 0; i < count; i++) {
            float ms;
            nj_status status = nji_stopwatch_time(watch, &plans[i], &ms, call);
            if (status != NJ_OK) return status;
            if (round <= 1 || ms < least[i]) least[i] = ms;
        }
    }
    return NJ_OK;
}

static nj_status nji_stopwatch_open(nji_stopwatch *watch, const char *call) {
    const nji_driver *driver = &watch->cuda->driver;
    nj_status status;
    if (!driver->cuEventCreate || !driver->cuEventDestroy || !driver->cuEventRecord ||
        !driver->cuEventSynchronize || !driver->cuEventElapsedTime) {
        return nji_fail(NJ_UNSUPPORTED,
                        "%s: pref.tune = NJ_TUNE_MEASURE: this driver has no events", call);
    }
    status =
        nji_tune_status(watch->cuda, driver->cuEventCreate(&watch->from, 0), "cuEventCreate", call);
    if (status != NJ_OK) return status;
    status =
        nji_tune_status(watch->cuda, driver->cuEventCreate(&watch->to, 0), "cuEventCreate", call);
    if (status != NJ_OK) driver->cuEventDestroy(watch->from);
    return status;
}

static void nji_stopwatch_close(nji_stopwatch *watch) {
    watch->cuda->driver.cuEventDestroy(watch->from);
    watch->cuda->driver.cuEventDestroy(watch->to);
}

/* The kernels of every candidate. */
static nj_status nji_tune_compile(nji_cuda *cuda, const nji_cuda_plan *plan, const nji_trial *trial,
                                  nji_cuda_plan *plans, const char *call) {
    nj_status status = NJ_OK;
    int i;
    for (i = 0; status == NJ_OK && i < trial->count; i++) {
        plans[i] = *plan;
        plans[i].choice = trial->choice[i];
        status = nji_cuda_select_kernels(cuda, &plans[i], trial->cols, call);
    }
    return status;
}

/* The candidate that is more than the margin faster than the first, and faster than all others;
   else the first. */
static int nji_tune_winner(const float *ms, int count) {
    int best = 0, i;
    for (i = 1; i < count; i++) {
        if (ms[i] < ms[best]) best = i;
    }
    return ms[best] < ms[0] * NJI_TUNE_MARGIN ? best : 0;
}

static nj_status nji_tune_measure(nji_cuda *cuda, const nji_cuda_plan *plan, nji_trial *trial,
                                  const nj_preference *pref, int *winner, const char *call) {
    nji_cuda_plan plans[NJI_TUNE_CANDIDATES];
    float ms[NJI_TUNE_CANDIDATES] = {0};
    nji_stopwatch watch;
    nj_status status = nji_tune_compile(cuda, plan, trial, plans, call);
    if (status != NJ_OK) return status;
    nji_trial_cut(trial, pref->tune_scratch_bytes);
    watch.cuda = cuda;
    watch.stream = pref->tune_stream;
    for (watch.sets = 0; watch.sets < trial->sets; watch.sets++)
        nji_trial_bind(trial, watch.sets, pref->tune_scratch, &watch.set[watch.sets]);
    status = nji_stopwatch_open(&watch, call);
    if (status != NJ_OK) return status;
    status = nji_stopwatch_rounds(&watch, plans, trial->count, ms, call);
    nji_stopwatch_close(&watch);
    if (status != NJ_OK) return status;
    *winner = nji_tune_winner(ms, trial->count);
    cuda->jit.stats.tunes++;
    nji_note(&cuda->jit.log, NJ_LOG_INFO,
             "measured %d geometries on %lld of the rows: number %d takes %.1f us, the table's "
             "%.1f us",
             trial->count, (long long)trial->rows, *winner, 1e3 * ms[*winner] / NJI_TUNE_LAUNCHES,
             1e3 * ms[0] / NJI_TUNE_LAUNCHES);
    return NJ_OK;
}

/* ---- memory --------------------------------------------------------------------------------- */

/* What is kept on disk, in an entry that says what it was measured with. */
typedef struct nji_tune_record {
    uint32_t candidate, count;
} nji_tune_record;

/* Of all that the answer depends on: the device by its name, too, since equal processors differ in
   their memory; the candidates by what they are compiled and launched with. */
static nji_jit_digest nji_tune_digest(const nji_cuda *cuda, const nji_cuda_plan *plan,
                                      const nji_trial *trial, int64_t rows) {
    nji_jit_digest digest;
    char text[320];
    int i, k;
    snprintf(text, sizeof text, "tune %d %d nvrtc %d.%d sm_%d%s %d %s %lld %lld", NJI_JIT_FORMAT,
             NJ_VERSION, cuda->jit.nvrtc.major, cuda->jit.nvrtc.minor, cuda->facts.arch,
             plan->arch_specific ? "a" : "", cuda->facts.multiprocessors, cuda->name,
             (long long)rows, (long long)trial->run);
    digest = nji_jit_digest_of(text);
    for (i = 0; i < trial->count; i++) {
        const nji_choice *choice = &trial->choice[i];
        nji_options options;
        snprintf(text, sizeof text, "%016llx %d",
                 (unsigned long long)nji_fast_program_of(choice)->hash, choice->parts);
        nji_jit_digest_add(&digest, text);
        nji_fast_options(&plan->desc, trial->cols, choice, &options);
        for (k = 0; k < options.count; k++) nji_jit_digest_add(&digest, options.list[k]);
    }
    return digest;
}

/* Without memory for it the next select asks the disk or measures again. */
static void nji_tuned_keep(nji_cuda *cuda, const nji_jit_digest *digest, int candidate) {
    nji_tuned *tuned = (nji_tuned *)NJ_MALLOC(sizeof *tuned);
    if (!tuned) return;
    tuned->next = cuda->tuned;
    tuned->digest = *digest;
    tuned->candidate = candidate;
    cuda->tuned = tuned;
}

static void nji_tuned_write(nji_cuda *cuda, const nji_jit_digest *digest, int candidate,
                            int count) {
    nji_tune_record record;
    record.candidate = (uint32_t)candidate;
    record.count = (uint32_t)count;
    nji_jit_remember(&cuda->jit, digest, &record, sizeof record, "a measured choice");
}

static int nji_tuned_find(nji_cuda *cuda, const nji_jit_digest *digest, int count, int *candidate) {
    const nji_tuned *tuned = cuda->tuned;
    nji_tune_record record;
    while (tuned && (tuned->digest.key != digest->key || tuned->digest.check != digest->check))
        tuned = tuned->next;
    if (tuned) {
        *candidate = tuned->candidate;
        return 1;
    }
    if (!nji_jit_recall(&cuda->jit, digest, &record, sizeof record)) return 0;
    if (record.count != (uint32_t)count || record.candidate >= (uint32_t)count) return 0;
    *candidate = (int)record.candidate;
    nji_tuned_keep(cuda, digest, *candidate);
    return 1;
}

/* Measures, having checked that it may. */
static nj_status nji_tune_now(nji_cuda *cuda, const nji_cuda_plan *plan, nji_trial *trial,
                              const nj_preference *pref, int *winner, const char *call) {
    int pushed;
    nj_status status = nji_check_scratch(trial, pref, call);
    if (status == NJ_OK) status = nji_cuda_enter(cuda, &pushed, call);
    if (status != NJ_OK) return status;
    status = nji_cuda_check_capture(cuda, NULL, call);
    if (status == NJ_OK && pref->tune_stream)
        status = nji_cuda_check_capture(cuda, pref->tune_stream, call);
    if (status == NJ_OK) status = nji_tune_measure(cuda, plan, trial, pref, winner, call);
    nji_cuda_leave(cuda, pushed);
    return status;
}

/* Chooses for a plan that has the table's choice: from memory, from disk, or by measuring now. The
   caller holds the ctx's lock. */
static nj_status nji_tune(nji_cuda *cuda, nji_cuda_plan *plan, int64_t rows, int64_t cols,
                          const nj_preference *pref, const char *call) {
    nji_trial trial;
    nji_jit_digest digest;
    nji_error before = nji_last;
    int winner = 0;
    nji_trial_make(&trial, cuda, plan, rows, cols, pref);
    if (trial.count < 2) return NJ_OK;
    digest = nji_tune_digest(cuda, plan, &trial, rows);
    if (!nji_tuned_find(cuda, &digest, trial.count, &winner)) {
        nj_status status = nji_tune_now(cuda, plan, &trial, pref, &winner, call);
        if (nji_is_refusal(status)) { /* select will meet it again, and knows what to do */
            nji_last = before;
            return NJ_OK;
        }
        if (status != NJ_OK) return status;
        nji_tuned_keep(cuda, &digest, winner);
        nji_tuned_write(cuda, &digest, winner, trial.count);
    }
    plan->choice = trial.choice[winner];
    plan->candidate = winner;
    plan->measured = 1;
    return NJ_OK;
}
