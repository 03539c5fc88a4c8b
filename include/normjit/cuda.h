/* CUDA backend: device, context, modules, launches. */

/* A module loaded in the ctx's CUDA context, found again by the key of what it was made from. */
typedef struct nji_module {
    struct nji_module *next;
    uint64_t key;
    nji_cu_module handle;
    nj_source source;
    int arch_specific;
} nji_module;

/* The candidate that measuring chose, found again by the digest of what it was chosen from. */
typedef struct nji_tuned {
    struct nji_tuned *next;
    nji_jit_digest digest;
    int candidate;
} nji_tuned;

typedef struct nji_cuda {
    nji_driver driver;
    nji_jit jit;
    nji_device_facts facts;
    int ordinal;          /* of the device */
    nji_cu_device device; /* the device's number and the driver's handle */
    char name[96];
    nji_cu_context context;
    int retained; /* the device's primary context is held by us */
    uint32_t flags;
    nji_module *modules; /* guarded by the ctx's lock, and so is what measuring found */
    nji_tuned *tuned;
    int refuses;         /* the driver is too old for what this NVRTC makes: embedded PTX only */
} nji_cuda;

/* Kernels of a choice. */
typedef struct nji_fast_kernels {
    nj_source source;
    void *first;  /* the rows or tiles kernel, or the split kernels' first */
    void *second; /* the split kernels' second */
} nji_fast_kernels;

/* Kernels of a plan; NULL where the plan has no use for one. */
typedef struct nji_cuda_plan {
    nji_choice choice, loose;
    nj_desc desc;
    size_t workspace_bytes;
    nj_source strided_source;
    int arch_specific;
    int measured, candidate; /* whether and which of nji_alternatives measuring chose */
    nji_fast_kernels fast[2]; /* by nji_choice.loose */
    void *strided, *strided_parts, *params_sum;
} nji_cuda_plan;

/* ---- context -------------------------------------------------------------------------------- */

/* Makes the ctx's CUDA context current in this thread; `pushed` says whether it was not. */
static nj_status nji_cuda_enter(const nji_cuda *cuda, int *pushed, const char *call) {
    void *current = NULL;
    int result = cuda->driver.cuCtxGetCurrent(&current);
    *pushed = 0;
    if (result == 0 && current == cuda->context) return NJ_OK;
    result = cuda->driver.cuCtxPushCurrent(cuda->context);
    if (result != 0) return nji_driver_fail(&cuda->driver, result, call, "cuCtxPushCurrent");
    *pushed = 1;
    return NJ_OK;
}

static void nji_cuda_leave(const nji_cuda *cuda, int pushed) {
    void *popped;
    if (pushed) cuda->driver.cuCtxPopCurrent(&popped);
}

static nj_status nji_cuda_attribute(const nji_cuda *cuda, int attribute, int *value,
                                    const char *call) {
    int result = cuda->driver.cuDeviceGetAttribute(value, attribute, cuda->device);
    return result == 0 ? NJ_OK
                       : nji_driver_fail(&cuda->driver, result, call, "cuDeviceGetAttribute");
}

#define NJI_LEAST_ARCH 75

static nj_status nji_cuda_find_device(nji_cuda *cuda, const nj_ctx_desc *desc, const char *call) {
    int count = 0, major = 0, minor = 0, result;
    nj_status status;
    result = cuda->driver.cuDeviceGetCount(&count);
    if (result != 0) return nji_driver_fail(&cuda->driver, result, call, "cuDeviceGetCount");
    if (desc->device >= count) {
        return nji_fail(NJ_UNSUPPORTED, "%s: desc.device = %d: the driver sees %d CUDA device(s)",
                        call, (int)desc->device, count);
    }
    cuda->ordinal = desc->device;
    result = cuda->driver.cuDeviceGet(&cuda->device, desc->device);
    if (result != 0) return nji_driver_fail(&cuda->driver, result, call, "cuDeviceGet");
    result = cuda->driver.cuDeviceGetName(cuda->name, (int)sizeof cuda->name, cuda->device);
    if (result != 0) return nji_driver_fail(&cuda->driver, result, call, "cuDeviceGetName");
    status = nji_cuda_attribute(cuda, NJI_CU_DEVICE_CC_MAJOR, &major, call);
    if (status == NJ_OK) status = nji_cuda_attribute(cuda, NJI_CU_DEVICE_CC_MINOR, &minor, call);
    if (status == NJ_OK) {
        status = nji_cuda_attribute(cuda, NJI_CU_DEVICE_MULTIPROCESSORS,
                                    &cuda->facts.multiprocessors, call);
    }
    if (status != NJ_OK) return status;
    cuda->facts.arch = major * 10 + minor;
    if (cuda->facts.arch < NJI_LEAST_ARCH) {
        return nji_fail(NJ_UNSUPPORTED,
                        "%s: desc.device = %d: %s is sm_%d: sm_%d or later is needed", call,
                        (int)desc->device, cuda->name, cuda->facts.arch, NJI_LEAST_ARCH);
    }
    return NJ_OK;
}

/* The caller's current context when it is on our device, else the device's primary one. */
static nj_status nji_cuda_find_context(nji_cuda *cuda, const char *call) {
    void *current = NULL;
    int device = -1, result;
    if (cuda->driver.cuCtxGetCurrent(&current) == 0 && current &&
        cuda->driver.cuCtxGetDevice(&device) == 0 && device == cuda->device) {
        cuda->context = current;
        return NJ_OK;
    }
    result = cuda->driver.cuDevicePrimaryCtxRetain(&cuda->context, cuda->device);
    if (result != 0)
        return nji_driver_fail(&cuda->driver, result, call, "cuDevicePrimaryCtxRetain");
    cuda->retained = 1;
    return NJ_OK;
}

/* Unloads and releases what is there; fields not yet filled are zero. */
static void nji_cuda_close(nji_cuda *cuda) {
    int pushed = 0;
    int entered = cuda->modules && cuda->driver.cuCtxPushCurrent(cuda->context) == 0;
    pushed = entered;
    while (cuda->modules) {
        nji_module *module = cuda->modules;
        cuda->modules = module->next;
        if (entered) cuda->driver.cuModuleUnload(module->handle);
        NJ_FREE(module);
    }
    nji_cuda_leave(cuda, pushed);
    while (cuda->tuned) {
        nji_tuned *tuned = cuda->tuned;
        cuda->tuned = tuned->next;
        NJ_FREE(tuned);
    }
    if (cuda->retained) cuda->driver.cuDevicePrimaryCtxRelease(cuda->device);
    nji_jit_close(&cuda->jit);
    nji_driver_close(&cuda->driver);
}

/* On failure everything is released again. */
static nj_status nji_cuda_open(nji_cuda *cuda, const nj_ctx_desc *desc, const char *call) {
    nj_status status;
    memset(cuda, 0, sizeof *cuda);
    cuda->flags = desc->flags;
    status = nji_driver_open(&cuda->driver, desc->driver_path, call);
    if (status != NJ_OK) return status;
    status = nji_cuda_find_device(cuda, desc, call);
    if (status == NJ_OK) status = nji_jit_open(&cuda->jit, desc, call);
    if (status == NJ_OK) status = nji_cuda_find_context(cuda, call);
    if (status != NJ_OK) nji_cuda_close(cuda);
    return status;
}

static void nji_cuda_describe(const nji_cuda *cuda, char *text, size_t size) {
    int used =
        snprintf(text, size, "CUDA device %d: %s (sm_%d, %d multiprocessors), driver %d.%d, ",
                 cuda->ordinal, cuda->name, cuda->facts.arch, cuda->facts.multiprocessors,
                 cuda->driver.version / 1000, cuda->driver.version % 1000 / 10);
    if (used < 0 || (size_t)used >= size) return;
    if (cuda->jit.has_nvrtc) {
        snprintf(text + used, size - (size_t)used, "NVRTC %d.%d", cuda->jit.nvrtc.major,
                 cuda->jit.nvrtc.minor);
    } else {
        snprintf(text + used, size - (size_t)used, "no NVRTC: embedded PTX");
    }
}

/* ---- modules -------------------------------------------------------------------------------- */

/* CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and its neighbours. */
static int nji_is_capture_error(int result) {
    return result >= 900 && result <= 908;
}

static nj_status nji_capture_fail(const char *call) {
    return nji_fail(NJ_UNSUPPORTED,
                    "%s: a stream is being captured: select plans before the capture begins", call);
}

/* Loads an image and adds it to the cache. */
static nj_status nji_cuda_load(nji_cuda *cuda, const void *image, nji_module *module,
                               const char *what, const char *call) {
    char log[2048];
    int option[2] = {NJI_CU_JIT_ERROR_LOG, NJI_CU_JIT_ERROR_LOG_BYTES};
    void *value[2];
    int result;
    log[0] = 0;
    value[0] = log;
    value[1] = (void *)(uintptr_t)sizeof log;
    result = cuda->driver.cuModuleLoadDataEx(&module->handle, image, 2, option, value);
    if (nji_is_capture_error(result)) return nji_capture_fail(call);
    if (result != 0) {
        nj_status status = nji_driver_fail(&cuda->driver, result, call, "cuModuleLoadDataEx");
        size_t used = strlen(nji_last.text);
        log[sizeof log - 1] = 0;
        snprintf(nji_last.text + used, sizeof nji_last.text - used, " (%s for sm_%d)%s%s", what,
                 cuda->facts.arch, log[0] ? "\n" : "", log);
        return status;
    }
    module->next = cuda->modules;
    cuda->modules = module;
    cuda->jit.stats.modules++;
    return NJ_OK;
}

static const nji_module *nji_cuda_cached(nji_cuda *cuda, uint64_t key) {
    const nji_module *module = cuda->modules;
    while (module && module->key != key) module = module->next;
    if (module) cuda->jit.stats.memory_hits++;
    else cuda->jit.stats.memory_misses++;
    return module;
}

static nji_module *nji_new_module(uint64_t key, nj_source source, const char *call) {
    nji_module *module = (nji_module *)NJ_MALLOC(sizeof *module);
    if (!module) {
        nji_out_of_memory(call, sizeof *module);
        return NULL;
    }
    memset(module, 0, sizeof *module);
    module->key = key;
    module->source = source;
    return module;
}

/* A compiled program: from memory, from disk, or made now. */
static nj_status nji_cuda_compiled(nji_cuda *cuda, const nji_jit_request *request,
                                   const nji_module **out, const char *call) {
    uint64_t key = nji_jit_key(&cuda->jit, request);
    nji_module *module;
    nji_image image;
    nj_status status;
    *out = nji_cuda_cached(cuda, key);
    if (*out) return NJ_OK;
    status = nji_jit_image(&cuda->jit, request, &image, call);
    if (status != NJ_OK) return status;
    module = nji_new_module(key, NJ_SOURCE_NVRTC, call);
    status =
        module ? nji_cuda_load(cuda, image.data, module, request->name, call) : NJ_OUT_OF_MEMORY;
    nji_image_free(&image);
    if (status != NJ_OK) {
        NJ_FREE(module);
        return status;
    }
    module->arch_specific = request->arch_specific;
    *out = module;
    return NJ_OK;
}

/* The embedded PTX of an element type, assembled by the driver. */
static nj_status nji_cuda_fallback(nji_cuda *cuda, nj_dtype dtype, const nji_module **out,
                                   const char *call) {
    const char *const *const ptx[] = {NULL, nji_fallback_f16, nji_fallback_bf16, nji_fallback_f32,
                                      nji_fallback_f64};
    uint64_t key = nji_hash_text(nji_hash_text(NJI_HASH_SEED, "fallback"), nji_device_type(dtype));
    nji_module *module;
    char *text;
    size_t size;
    nj_status status;
    *out = nji_cuda_cached(cuda, key);
    if (*out) return NJ_OK;
    status = nji_jit_join(ptx[dtype], &text, &size, call);
    if (status != NJ_OK) return status;
    module = nji_new_module(key, NJ_SOURCE_FALLBACK_PTX, call);
    status = module ? nji_cuda_load(cuda, text, module, "embedded PTX", call) : NJ_OUT_OF_MEMORY;
    NJ_FREE(text);
    if (status != NJ_OK) {
        NJ_FREE(module);
        return status;
    }
    *out = module;
    return NJ_OK;
}

static nj_status nji_cuda_function(const nji_cuda *cuda, const nji_module *module, const char *name,
                                   void **out, const char *call) {
    int result = cuda->driver.cuModuleGetFunction(out, module->handle, name);
    if (result == 0) return NJ_OK;
    *out = NULL;
    return nji_driver_fail(&cuda->driver, result, call, "cuModuleGetFunction");
}

/* ---- select --------------------------------------------------------------------------------- */

/* The fast kernels of a family: names by [forward][which]. */
typedef struct nji_fast_program {
    const char *name;
    const char *const *lines;
    uint64_t hash;
    const char *kernel[2][2];
} nji_fast_program;

static const nji_fast_program *nji_fast_program_of(const nji_choice *choice) {
    static const nji_fast_program loose[] = {
        {"norm_rows.cu",
         nji_program_rows,
         NJI_PROGRAM_ROWS_HASH,
         {{"nj_loose_rows_backward", NULL}, {"nj_loose_rows_forward", NULL}}},
        {"norm_rows.cu",
         nji_program_rows,
         NJI_PROGRAM_ROWS_HASH,
         {{"nj_loose_split_backward_sums", "nj_loose_split_backward_write"},
          {"nj_loose_split_forward_sums", "nj_loose_split_forward_write"}}}};
    static const nji_fast_program program[] = {
        {"norm_rows.cu",
         nji_program_rows,
         NJI_PROGRAM_ROWS_HASH,
         {{"nj_rows_backward", NULL}, {"nj_rows_forward", NULL}}},
        {"norm_rows.cu",
         nji_program_rows,
         NJI_PROGRAM_ROWS_HASH,
         {{"nj_split_backward_sums", "nj_split_backward_write"},
          {"nj_split_forward_sums", "nj_split_forward_write"}}},
        {"norm_tiles.cu",
         nji_program_tiles,
         NJI_PROGRAM_TILES_HASH,
         {{"nj_tiles_backward", NULL}, {"nj_tiles_forward", NULL}}},
        {"norm_ring.cuh",
         nji_program_ring,
         NJI_PROGRAM_RING_HASH,
         {{"nj_ring_backward", NULL}, {"nj_ring_forward", NULL}}}};
    return choice->loose ? &loose[choice->family] : &program[choice->family];
}

static int nji_writes_full(const nj_desc *desc) {
    return desc->op == NJ_OP_LAYER_NORM_FORWARD || (desc->grads & NJ_GRAD_DX) != 0;
}

static nj_status nji_cuda_select_fast(nji_cuda *cuda, nji_cuda_plan *plan,
                                      const nji_choice *choice, int64_t cols, const char *call) {
    const nji_fast_program *program = nji_fast_program_of(choice);
    const char *const *kernel = program->kernel[choice->forward];
    nji_fast_kernels *kernels = &plan->fast[choice->loose];
    nji_options options;
    nji_jit_request request;
    const nji_module *module;
    nj_status status;
    nji_fast_options(&plan->desc, cols, choice, &options);
    request.name = program->name;
    request.lines = program->lines;
    request.source_hash = program->hash;
    request.options = options.list;
    request.option_count = options.count;
    request.arch = cuda->facts.arch;
    request.arch_specific = plan->arch_specific;
    status = nji_cuda_compiled(cuda, &request, &module, call);
    if (status != NJ_OK) return status;
    kernels->source = module->source;
    status = nji_cuda_function(cuda, module, kernel[0], &kernels->first, call);
    if (status == NJ_OK && choice->shared_bytes > 0) {
        int result = cuda->driver.cuFuncSetAttribute(
            kernels->first, NJI_CU_FUNC_MOST_DYNAMIC_SHARED, choice->shared_bytes);
        if (result != 0) {
            return nji_driver_fail(&cuda->driver, result, call, "cuFuncSetAttribute");
        }
    }
    if (status == NJ_OK && kernel[1] && nji_writes_full(&plan->desc)) {
        status = nji_cuda_function(cuda, module, kernel[1], &kernels->second, call);
    }
    return status;
}

static int nji_cuda_compiles(const nji_cuda *cuda) {
    return cuda->jit.has_nvrtc && !cuda->refuses;
}

static nj_status nji_cuda_select_strided(nji_cuda *cuda, nji_cuda_plan *plan, const char *call) {
    const nji_module *module;
    nj_status status;
    if (nji_cuda_compiles(cuda)) {
        nji_options options;
        nji_jit_request request;
        nji_strided_options(&plan->desc, &plan->choice, &options);
        request.name = "norm_strided.cu";
        request.lines = nji_program_strided;
        request.source_hash = NJI_PROGRAM_STRIDED_HASH;
        request.options = options.list;
        request.option_count = options.count;
        request.arch = cuda->facts.arch;
        request.arch_specific = plan->arch_specific;
        status = nji_cuda_compiled(cuda, &request, &module, call);
    } else {
        status = nji_cuda_fallback(cuda, plan->desc.dtype, &module, call);
    }
    if (status != NJ_OK) return status;
    plan->strided_source = module->source;
    if (plan->choice.forward) {
        return nji_cuda_function(cuda, module, "nj_strided_forward", &plan->strided, call);
    }
    if (plan->desc.grads & NJ_GRAD_DX) {
        status = nji_cuda_function(cuda, module, "nj_strided_backward", &plan->strided, call);
    }
    if (status == NJ_OK && nji_wants_params(&plan->desc)) {
        status = nji_cuda_function(cuda, module, "nj_strided_parts", &plan->strided_parts, call);
        if (status != NJ_OK) return status;
        status = nji_cuda_function(cuda, module, "nj_params_sum", &plan->params_sum, call);
    }
    return status;
}

static nj_status nji_cuda_select_kernels(nji_cuda *cuda, nji_cuda_plan *plan, int64_t cols,
                                         const char *call) {
    nj_status status = NJ_OK;
    if (nji_cuda_compiles(cuda) && plan->choice.family != NJI_STRIDED) {
        status = nji_cuda_select_fast(cuda, plan, &plan->choice, cols, call);
    }
    if (status == NJ_OK && nji_cuda_compiles(cuda) && plan->loose.family != NJI_STRIDED) {
        status = nji_cuda_select_fast(cuda, plan, &plan->loose, cols, call);
    }
    return status == NJ_OK ? nji_cuda_select_strided(cuda, plan, call) : status;
}

/* A driver older than NVRTC may refuse what that makes. The embedded PTX is for any driver. */
static int nji_is_refusal(nj_status status) {
    int error = nji_last.info.driver_error;
    return status == NJ_DRIVER &&
           (error == NJI_CU_NO_BINARY_FOR_GPU || error == NJI_CU_INVALID_PTX ||
            error == NJI_CU_UNSUPPORTED_PTX_VERSION);
}

static nj_status nji_cuda_check_capture(const nji_cuda *cuda, void *stream, const char *call) {
    int capturing = NJI_CU_CAPTURE_NONE;
    int result = cuda->driver.cuStreamIsCapturing(stream, &capturing);
    if (nji_is_capture_error(result) || capturing != NJI_CU_CAPTURE_NONE)
        return nji_capture_fail(call);
    return result == 0 ? NJ_OK
                       : nji_driver_fail(&cuda->driver, result, call, "cuStreamIsCapturing");
}

/* The plan's choices by the table. Nothing is compiled. */
static nj_status nji_cuda_choose(const nji_cuda *cuda, const nj_desc *desc, int64_t rows,
                                 int64_t cols, const nj_preference *pref, nji_cuda_plan *plan,
                                 const char *call) {
    nj_status status;
    memset(plan, 0, sizeof *plan);
    plan->desc = *desc;
    plan->arch_specific = pref->allow_arch_specific && cuda->facts.arch >= 90;
    status = nji_choose(desc, rows, cols, &cuda->facts, pref, &plan->choice, call);
    if (status != NJ_OK) return status;
    return nji_choose_loose(desc, rows, cols, &cuda->facts, pref, &plan->loose, call);
}

/* The kernels of a plan that has its choice. The caller holds the ctx's lock. */
static nj_status nji_cuda_select(nji_cuda *cuda, nji_cuda_plan *plan, int64_t cols,
                                 const char *call) {
    int pushed;
    nj_status status;
    nji_error before = nji_last;
    int64_t fast = nji_workspace_of(&plan->choice), loose = nji_workspace_of(&plan->loose);
    plan->workspace_bytes = (size_t)(fast > loose ? fast : loose);
    status = nji_cuda_enter(cuda, &pushed, call);
    if (status != NJ_OK) return status;
    status = nji_cuda_check_capture(cuda, NULL, call);
    if (status == NJ_OK) status = nji_cuda_select_kernels(cuda, plan, cols, call);
    if (nji_is_refusal(status) && nji_cuda_compiles(cuda)) {
        nji_note(&cuda->jit.log, NJ_LOG_WARNING, "using the embedded PTX: %s", nji_last.text);
        nji_last = before;
        cuda->refuses = 1;
        memset(plan->fast, 0, sizeof plan->fast);
        status = nji_cuda_select_strided(cuda, plan, call);
    }
    nji_cuda_leave(cuda, pushed);
    return status;
}

/* ---- checks that only the driver can make --------------------------------------------------- */

/* With NJ_CTX_CHECK_POINTERS: every operand is memory that the plan's device can use. */
static nj_status nji_cuda_check_operands(const nji_cuda *cuda, const nji_view *views, int count,
                                         const char *call) {
    int pushed, i;
    nj_status status;
    if (!(cuda->flags & NJ_CTX_CHECK_POINTERS)) return NJ_OK;
    status = nji_cuda_enter(cuda, &pushed, call);
    for (i = 0; status == NJ_OK && i < count; i++) {
        uint64_t address = (uint64_t)views[i].first_byte;
        unsigned type = 0;
        int ordinal = 0;
        if (views[i].empty) continue;
        if (cuda->driver.cuPointerGetAttribute(&type, NJI_CU_POINTER_MEMORY_TYPE, address) != 0) {
            status =
                nji_fail(NJ_INVALID_ARGUMENT,
                         "%s: args.%s.data = %p: host memory that the driver does not know: a CUDA "
                         "plan needs device memory",
                         call, views[i].name, views[i].data);
        } else if (type == NJI_CU_MEMORY_DEVICE &&
                   cuda->driver.cuPointerGetAttribute(&ordinal, NJI_CU_POINTER_DEVICE_ORDINAL,
                                                      address) == 0 &&
                   ordinal != cuda->ordinal) {
            status =
                nji_fail(NJ_INVALID_ARGUMENT,
                         "%s: args.%s.data = %p: memory of device %d: the plan is for device %d",
                         call, views[i].name, views[i].data, ordinal, cuda->ordinal);
        }
    }
    nji_cuda_leave(cuda, pushed);
    return status;
}

/* ---- run ------------------------------------------------------------------------------------ */

/* Address and strides of `dims` dims allow accesses of `bytes`, a power of two. */
static int nji_is_aligned(const nji_operand *operand, int dims, int64_t bytes,
                          int64_t element_bytes) {
    uint64_t steps = (uint64_t)(uintptr_t)operand->data;
    int d;
    for (d = 0; d < dims; d++) steps |= (uint64_t)(operand->stride[d] * element_bytes);
    return (steps & (uint64_t)(bytes - 1)) == 0;
}

/* Whether the rows kernels take these operands. */
static int nji_takes_rows(const nji_cuda_plan *plan, const nji_problem *problem, nj_layout layout) {
    int64_t size = (int64_t)nj_dtype_size(plan->desc.dtype);
    int64_t param_size = (int64_t)nj_dtype_size(plan->desc.param_dtype);
    int64_t bytes = plan->choice.vec * size;
    int64_t param_bytes = nji_min_i64(16, plan->choice.vec * param_size);
    int dims = problem->row_dims;
    return (layout == NJ_LAYOUT_PACKED || layout == NJ_LAYOUT_PADDED_ROWS) &&
           nji_is_aligned(&problem->x, dims, bytes, size) &&
           nji_is_aligned(&problem->dy, dims, bytes, size) &&
           nji_is_aligned(&problem->y, dims, bytes, size) &&
           nji_is_aligned(&problem->dx, dims, bytes, size) &&
           nji_is_aligned(&problem->gamma, dims, param_bytes, param_size) &&
           nji_is_aligned(&problem->beta, dims, param_bytes, param_size);
}

/* An operand whose last row dim is packed, and whose other strides keep accesses aligned. */
static int nji_fits_tiles(const nji_problem *problem, const nji_operand *operand, int64_t vec,
                          int64_t size) {
    nji_operand outer = *operand;
    if (!operand->data) return 1;
    if (operand->stride[problem->row_dims - 1] != 1) return 0;
    outer.stride[problem->row_dims - 1] = 0;
    return nji_is_aligned(&outer, problem->row_dims + problem->col_dims, vec * size, size);
}

/* Whether the tiles kernels take these operands. */
static int nji_takes_tiles(const nji_cuda_plan *plan, const nji_problem *problem,
                           nj_layout layout) {
    int64_t size = (int64_t)nj_dtype_size(plan->desc.dtype), vec = plan->choice.vec;
    return layout == NJ_LAYOUT_CHANNELS_FIRST && problem->col_dims <= 1 &&
           problem->extent[problem->row_dims - 1] % vec == 0 &&
           nji_fits_tiles(problem, &problem->x, vec, size) &&
           nji_fits_tiles(problem, &problem->dy, vec, size) &&
           nji_fits_tiles(problem, &problem->y, vec, size) &&
           nji_fits_tiles(problem, &problem->dx, vec, size);
}

static int nji_takes_fast(const nji_cuda_plan *plan, const nji_problem *problem, nj_layout layout) {
    return plan->choice.family == NJI_TILES ? nji_takes_tiles(plan, problem, layout)
                                            : nji_takes_rows(plan, problem, layout);
}

/* Whether the loose kernels take these operands. Where neighbouring rows are adjacent the strided
   ones read them in one access, these in one for each. */
static int nji_takes_loose(const nji_problem *problem, nj_layout layout) {
    return layout != NJ_LAYOUT_CHANNELS_FIRST && problem->col_dims <= 1;
}

/* The choice whose kernels take these operands; NULL: the strided kernels do. */
static const nji_choice *nji_choice_for(const nji_cuda_plan *plan, const nji_problem *problem,
                                        nj_layout layout) {
    if (plan->fast[0].first && nji_takes_fast(plan, problem, layout)) return &plan->choice;
    if (plan->fast[1].first && nji_takes_loose(problem, layout)) return &plan->loose;
    return NULL;
}

/* Grid and block of one launch; x alone is large. */
typedef struct nji_grid {
    int64_t x;
    unsigned y, block_x, block_y;
    unsigned shared_bytes;
} nji_grid;

static nji_grid nji_grid_of(int64_t x, int64_t y, int block_x, int block_y) {
    nji_grid grid;
    grid.x = nji_min_i64(x, INT32_MAX); /* kernels walk over what is left */
    grid.y = (unsigned)y;
    grid.block_x = (unsigned)block_x;
    grid.block_y = (unsigned)block_y;
    grid.shared_bytes = 0;
    return grid;
}

/* Graphs take dependent launches since CUDA 12.3. */
static int nji_launches_dependently(const nji_cuda *cuda) {
    return cuda->facts.arch >= 90 && cuda->driver.version >= 12030 && cuda->driver.cuLaunchKernelEx;
}

/* Where the device can, a kernel may take its place while its predecessor still runs; it waits for
   it by itself (nji_begin in ptx_src/nj_device.cuh). */
static nj_status nji_launch(const nji_cuda *cuda, nji_cu_function function, const nji_grid *grid,
                            nji_problem *problem, void *stream, const char *call) {
    nji_cu_launch_attribute attribute;
    nji_cu_launch_config config;
    void *parameters[1];
    int result;
    parameters[0] = problem;
    if (!nji_launches_dependently(cuda)) {
        result = cuda->driver.cuLaunchKernel(function, (unsigned)grid->x, grid->y, 1, grid->block_x,
                                             grid->block_y, 1, grid->shared_bytes, stream,
                                             parameters, NULL);
        return result == 0 ? NJ_OK : nji_driver_fail(&cuda->driver, result, call, "cuLaunchKernel");
    }
    memset(&attribute, 0, sizeof attribute);
    attribute.id = NJI_CU_LAUNCH_PROGRAMMATIC_SERIALIZATION;
    attribute.value.programmatic_serialization = 1;
    memset(&config, 0, sizeof config);
    config.grid_x = (unsigned)grid->x;
    config.grid_y = grid->y;
    config.grid_z = 1;
    config.block_x = grid->block_x;
    config.block_y = grid->block_y;
    config.block_z = 1;
    config.shared_bytes = grid->shared_bytes;
    config.stream = stream;
    config.attributes = &attribute;
    config.attribute_count = 1;
    result = cuda->driver.cuLaunchKernelEx(&config, function, parameters, NULL);
    return result == 0 ? NJ_OK : nji_driver_fail(&cuda->driver, result, call, "cuLaunchKernelEx");
}

static nj_status nji_launch_params_sum(const nji_cuda *cuda, const nji_cuda_plan *plan,
                                       nji_problem *problem, void *stream, const char *call) {
    unsigned grads = plan->desc.grads;
    int64_t wanted = ((grads & NJ_GRAD_DGAMMA) != 0) + ((grads & NJ_GRAD_DBETA) != 0);
    /* Enough lanes to load all parts at once, and one thread for each column at the end. */
    int lanes = nji_power_of_two_above((int)nji_clamp(
        nji_ceil_div(problem->parts, NJI_SUM_BATCH), NJI_SUM_WIDTH, NJI_SUM_LANES));
    nji_grid grid =
        nji_grid_of(nji_ceil_div(problem->cols, NJI_SUM_COLS), wanted, NJI_SUM_THREADS, lanes);
    return nji_launch(cuda, plan->params_sum, &grid, problem, stream, call);
}

/* Groups of rows that the blocks of the fast kernels take one by one. */
static int64_t nji_fast_blocks(const nji_choice *choice, const nji_problem *problem) {
    int64_t run =
        choice->family == NJI_TILES ? problem->extent[problem->row_dims - 1] : problem->rows;
    return problem->rows / run * nji_ceil_div(run, nji_block_rows(choice));
}

/* A ring kernel of one cluster writes dgamma and dbeta itself. */
static int nji_finishes_alone(const nji_choice *choice) {
    return choice->family == NJI_RING && choice->parts == 1;
}

/* Fast kernels, and the sum of the parts between them. */
static nj_status nji_run_fast(const nji_cuda *cuda, const nji_cuda_plan *plan,
                              const nji_choice *choice, nji_problem *problem, void *stream,
                              const char *call) {
    const nji_fast_kernels *kernels = &plan->fast[choice->loose];
    int64_t blocks = nji_fast_blocks(choice, problem);
    int64_t most = INT32_MAX / choice->slices; /* whole clusters */
    nji_grid all = nji_grid_of(nji_min_i64(blocks, most) * choice->slices, 1, choice->threads, 1);
    nji_grid first = all;
    nj_status status;
    first.shared_bytes = (unsigned)choice->shared_bytes;
    if (choice->parts > 0) {
        first.x = (int64_t)choice->parts * choice->slices;
    } else if (choice->family == NJI_TILES || choice->family == NJI_RING) {
        /* Blocks that stay have the next rows on their way. */
        first.x =
            nji_min_i64(blocks, nji_resident_clusters(choice, &cuda->facts)) * choice->slices;
    }
    problem->parts = choice->parts;
    if (problem->partial) problem->sums = (char *)problem->partial + nji_sums_offset(choice);
    status = nji_launch(cuda, kernels->first, &first, problem, stream, call);
    if (status == NJ_OK && plan->params_sum && !nji_finishes_alone(choice)) {
        status = nji_launch_params_sum(cuda, plan, problem, stream, call);
    }
    if (status == NJ_OK && kernels->second) {
        status = nji_launch(cuda, kernels->second, &all, problem, stream, call);
    }
    return status;
}

/* The parts first: dx may take the place of x or dy. */
static nj_status nji_run_strided(const nji_cuda *cuda, const nji_cuda_plan *plan,
                                 nji_problem *problem, int rows_fast, void *stream,
                                 const char *call) {
    nj_status status = NJ_OK;
    nji_grid grid;
    problem->rows_fast = rows_fast;
    problem->parts = plan->choice.strided_parts;
    if (plan->strided_parts && problem->parts > 0) {
        problem->row_lanes = nji_parts_row_lanes(rows_fast);
        grid = nji_grid_of(nji_ceil_div(problem->cols, NJI_STRIDED_THREADS / problem->row_lanes),
                           problem->parts, NJI_STRIDED_THREADS, 1);
        status = nji_launch(cuda, plan->strided_parts, &grid, problem, stream, call);
    }
    if (status == NJ_OK && plan->params_sum && problem->cols > 0) {
        status = nji_launch_params_sum(cuda, plan, problem, stream, call);
    }
    if (status == NJ_OK && plan->strided && problem->rows > 0 &&
        (problem->cols > 0 || plan->choice.forward)) {
        problem->row_lanes = nji_strided_row_lanes(problem->cols, rows_fast);
        grid =
            nji_grid_of(nji_ceil_div(problem->rows, problem->row_lanes), 1, NJI_STRIDED_THREADS, 1);
        status = nji_launch(cuda, plan->strided, &grid, problem, stream, call);
    }
    return status;
}

static nj_status nji_cuda_run(const nji_cuda *cuda, const nji_cuda_plan *plan, nji_problem *problem,
                              void *stream, const char *call) {
    nj_layout layout = nji_layout_of(problem);
    const nji_choice *choice = problem->rows > 0 ? nji_choice_for(plan, problem, layout) : NULL;
    int pushed;
    nj_status status = nji_cuda_enter(cuda, &pushed, call);
    if (status != NJ_OK) return status;
    if (choice) {
        status = nji_run_fast(cuda, plan, choice, problem, stream, call);
    } else {
        status =
            nji_run_strided(cuda, plan, problem, layout == NJ_LAYOUT_CHANNELS_FIRST, stream, call);
    }
    nji_cuda_leave(cuda, pushed);
    return status;
}

static void nji_cuda_sku(const nji_cuda *cuda, const nji_cuda_plan *plan,
                         const nji_problem *problem, nj_sku *out) {
    const nji_choice *choice = nji_choice_for(plan, problem, (nj_layout)out->layout);
    const char *kernel = choice ? nji_fast_program_of(choice)->kernel[choice->forward][0]
                         : plan->choice.forward ? "nj_strided_forward"
                         : plan->strided        ? "nj_strided_backward"
                                                : "nj_strided_parts";
    int size = (int)nj_dtype_size(plan->desc.dtype);
    out->arch = cuda->facts.arch;
    out->arch_specific = plan->arch_specific;
    out->source = (int32_t)(choice ? plan->fast[choice->loose].source : plan->strided_source);
    out->threads = choice ? choice->threads : NJI_STRIDED_THREADS;
    out->vector_bytes = choice ? choice->vec * size : size;
    out->candidate = choice == &plan->choice ? plan->candidate : 0;
    snprintf(out->kernel, sizeof out->kernel, "%s", kernel);
}
