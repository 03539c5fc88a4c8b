/* Public declarations. */
#include <stddef.h>
#include <stdint.h>

#define NJ_VERSION_MAJOR 0
#define NJ_VERSION_MINOR 1
#define NJ_VERSION_PATCH 0
#define NJ_VERSION_STRING "0.1.0"
#define NJ_VERSION (NJ_VERSION_MAJOR * 10000 + NJ_VERSION_MINOR * 100 + NJ_VERSION_PATCH)

#define NJ_MAX_RANK 8

/* NJ_STATIC, defined beside NORMJIT_IMPLEMENTATION: every function is private to that file. */
#if defined(NJ_STATIC) && (defined(__GNUC__) || defined(__clang__))
#define NJ_API static __attribute__((unused))
#elif defined(NJ_STATIC)
#define NJ_API static
#elif defined(__cplusplus)
#define NJ_API extern "C"
#else
#define NJ_API extern
#endif

typedef struct nj_ctx nj_ctx;   /* a backend, its device and its kernel cache */
typedef struct nj_plan nj_plan; /* one operation on one shape, compiled */

typedef enum nj_status {
    NJ_OK = 0,
    NJ_INVALID_ARGUMENT,    /* malformed: null, out of range, wrong shape */
    NJ_INVALID_PROBLEM,     /* well formed, but its parts contradict each other */
    NJ_UNSUPPORTED,         /* sound, but no kernel, device or preference meets it */
    NJ_MISALIGNED_OPERAND,  /* an address that the element type (or the workspace) forbids */
    NJ_BUFFER_TOO_SMALL,    /* strides reach past the buffer; needed and got in elements */
    NJ_WORKSPACE_TOO_SMALL, /* needed and got in bytes */
    NJ_OUT_OF_MEMORY,
    NJ_LIBRARY_NOT_FOUND, /* the driver or NVRTC; the text lists where it was sought */
    NJ_COMPILE_FAILED,    /* the text holds NVRTC's log */
    NJ_DRIVER             /* a driver call failed; the text names the call and its error */
} nj_status;

typedef enum nj_backend {
    NJ_BACKEND_AUTO = 0, /* CUDA when a device can be used, else host */
    NJ_BACKEND_CUDA,
    NJ_BACKEND_HOST
} nj_backend;

typedef enum nj_op {
    NJ_OP_UNSET = 0,
    NJ_OP_LAYER_NORM_FORWARD,
    NJ_OP_LAYER_NORM_BACKWARD,
    NJ_OP_RMS_NORM_FORWARD, /* the RMSNorm pair is UNSUPPORTED in this version */
    NJ_OP_RMS_NORM_BACKWARD
} nj_op;

typedef enum nj_dtype { NJ_DTYPE_UNSET = 0, NJ_F16, NJ_BF16, NJ_F32, NJ_F64 } nj_dtype;

/* Bits of nj_desc.grads and nj_desc.accumulate. */
#define NJ_GRAD_DX 1u
#define NJ_GRAD_DGAMMA 2u
#define NJ_GRAD_DBETA 4u

/* A view of a buffer. Element (i0, i1, ...) is data[offset + i0*stride[0] + i1*stride[1] + ...].
   Axes of extent 1 ignore their stride. */
typedef struct nj_tensor {
    void *data;                 /* start of the buffer, aligned to its element type */
    int64_t offset;             /* elements from data to element (0, 0, ...) */
    int64_t count;              /* elements in the buffer; 0 = not known, then reach is unchecked */
    int32_t rank;               /* 1..NJ_MAX_RANK */
    int64_t shape[NJ_MAX_RANK]; /* extents */
    int64_t stride[NJ_MAX_RANK]; /* elements, not bytes */
} nj_tensor;

/* The same for an operand that is only read: strides may be 0 (broadcast) or negative (flipped). */
typedef struct nj_const_tensor {
    const void *data;
    int64_t offset;
    int64_t count;
    int32_t rank;
    int64_t shape[NJ_MAX_RANK];
    int64_t stride[NJ_MAX_RANK];
} nj_const_tensor;

/* What is computed. Rows and cols: the normalized axes form the columns (cols = product of their
   extents), the other axes the rows. Variance is biased; arithmetic and sums are f32, for f64 f64.

     forward   mean = sum(x)/cols    rstd = 1/sqrt(sum((x-mean)^2)/cols + eps)
               y = (x-mean)*rstd*gamma + beta
     backward  xhat = (x-mean)*rstd  g = dy*gamma
               dx = rstd*(g - sum(g)/cols - xhat*sum(g*xhat)/cols)
               dgamma = sum over rows of dy*xhat     dbeta = sum over rows of dy
   (Ba, Kiros, Hinton: Layer Normalization, arXiv:1607.06450; the gradient is the chain rule.)

   A field left 0 is unset: an error where it says required, else the default named here. */
typedef struct nj_desc {
    int32_t rank;               /* required: 1..NJ_MAX_RANK */
    uint32_t norm_axes;         /* required: bit d = axis d is normalized */
    int64_t shape[NJ_MAX_RANK]; /* extents of x; 0 is legal: no rows, or no columns */
    nj_op op;                   /* required */
    nj_dtype dtype;             /* required: x, y, dy, dx */
    nj_dtype param_dtype; /* gamma, beta, dgamma, dbeta; default dtype; f64 only with dtype f64 */
    nj_dtype stat_dtype;  /* mean, rstd: f32 (default) or dtype; f64 always with dtype f64 */
    int32_t has_gamma;    /* 0: gamma = 1 */
    int32_t has_beta;     /* 0: beta = 0 */
    double eps;           /* forward only: finite, >= 0, used as given (0 means 0) */
    uint32_t grads;       /* backward: NJ_GRAD_*; default dx, and what has_gamma, has_beta imply */
    uint32_t accumulate;  /* backward: those of grads that are added to, not overwritten */
} nj_desc;

/* How the geometry of a kernel is found: how many rows a block works on, how much it reads ahead.
   */
typedef enum nj_tune {
    NJ_TUNE_TABLE = 0, /* in the library's table */
    NJ_TUNE_MEASURE    /* the few best of the table are timed: see nj_tune_scratch_size */
} nj_tune;

/* What the choice of a kernel must respect. Zero: no demand. A demand that cannot be met makes
   nj_plan_select return NJ_UNSUPPORTED; none is ignored. */
typedef struct nj_preference {
    uint64_t max_workspace_bytes; /* 0 = no limit */
    int32_t deterministic;        /* 1: equal bits on every run with equal inputs */
    int32_t batch_invariant;     /* 1: y, dx, mean, rstd of a row do not depend on the other rows */
    int32_t allow_arch_specific; /* 1: may compile for sm_90a and the like */
    nj_backend prefer_backend;   /* AUTO: the ctx's. HOST is open to any ctx */
    nj_tune tune;
    void *tune_scratch;          /* MEASURE: device memory, a multiple of 256; overwritten */
    uint64_t tune_scratch_bytes; /* nj_tune_scratch_size says how many */
    void *tune_stream; /* MEASURE: a CUstream or cudaStream_t; NULL = the legacy default stream */
} nj_preference;

/* Operands of one run. A tensor of x's shape has x's rank and extents; a statistic has x's rank
   with extent 1 at every normalized axis (nj_desc_stat_shape); a parameter has the normalized axes'
   extents in their order (nj_desc_param_shape). Strides are free; see nj_plan_run for aliasing. */
typedef struct nj_args {
    nj_const_tensor x;     /* x's shape */
    nj_const_tensor dy;    /* x's shape; backward */
    nj_const_tensor gamma; /* parameter; when has_gamma */
    nj_const_tensor beta;  /* parameter; forward, when has_beta */
    nj_tensor mean;   /* statistic; forward writes it (data NULL: not wanted), backward reads it */
    nj_tensor rstd;   /* statistic; likewise */
    nj_tensor y;      /* x's shape; forward */
    nj_tensor dx;     /* x's shape; backward, when in grads */
    nj_tensor dgamma; /* parameter; backward, when in grads */
    nj_tensor dbeta;  /* parameter; backward, when in grads */
} nj_args;

typedef enum nj_layout {
    NJ_LAYOUT_UNSET = 0,
    NJ_LAYOUT_PACKED,        /* unit-stride columns, rows one after the other */
    NJ_LAYOUT_PADDED_ROWS,   /* unit-stride columns, any row strides */
    NJ_LAYOUT_STRIDED,       /* any strides */
    NJ_LAYOUT_CHANNELS_FIRST /* strided columns, neighbouring rows adjacent (NCHW, axis 1) */
} nj_layout;

typedef enum nj_source {
    NJ_SOURCE_UNSET = 0,
    NJ_SOURCE_HOST,        /* C code of this library */
    NJ_SOURCE_NVRTC,       /* compiled for the device by NVRTC, now or earlier (caches) */
    NJ_SOURCE_FALLBACK_PTX /* the PTX embedded in this header, assembled by the driver */
} nj_source;

/* Which kernel a plan runs. All bytes are defined: comparable with memcmp. */
typedef struct nj_sku {
    int32_t op, dtype, param_dtype, stat_dtype;
    int32_t layout;        /* nj_layout */
    int32_t backend;       /* nj_backend */
    int32_t source;        /* nj_source */
    int32_t arch;          /* 90 for sm_90; 0 on the host */
    int32_t arch_specific; /* 1: sm_90a and the like */
    int32_t math;          /* nj_dtype of arithmetic and accumulators */
    int32_t grads, accumulate;
    int32_t threads;      /* per block; 0 on the host */
    int32_t vector_bytes; /* width of one memory access of x */
    int32_t candidate;    /* 0: the tuning table's geometry; else another, measured to be faster */
    char kernel[48];
} nj_sku;

/* What a plan guarantees for every layout that it serves. */
typedef struct nj_precision {
    int32_t math, accumulator;           /* nj_dtype */
    int32_t deterministic;               /* equal inputs, equal bits, run after run */
    int32_t bit_stable_on_same_hardware; /* also across plans and processes (host: any thread
                                            count) */
    int32_t batch_invariant; /* a row's y, dx, mean, rstd do not depend on the other rows, nor on
                                how many there are, as long as its own strides stay the same */
} nj_precision;

/* Counts since the ctx was made. */
typedef struct nj_cache_stats {
    uint64_t memory_hits, memory_misses;
    uint64_t disk_hits, disk_misses; /* a corrupt, foreign or stale entry is a miss */
    uint64_t disk_writes, disk_write_failures;
    uint64_t compiles; /* NVRTC programs compiled */
    uint64_t modules;  /* modules held now */
    uint64_t tunes;    /* plans whose geometries were measured */
} nj_cache_stats;

typedef enum nj_log_level { NJ_LOG_INFO = 0, NJ_LOG_WARNING } nj_log_level;
typedef void (*nj_log_fn)(void *user, nj_log_level level, const char *text);

/* Bits of nj_ctx_desc.flags. */
#define NJ_CTX_CHECK_POINTERS 1u /* run asks the driver where operands live: some us a call */
#define NJ_CTX_FALLBACK_PTX 2u   /* do not look for NVRTC: use the embedded PTX */

typedef struct nj_ctx_desc {
    int32_t device;           /* CUDA device ordinal */
    uint32_t flags;           /* NJ_CTX_* */
    nj_backend backend;       /* AUTO: CUDA when it can be used, else host */
    const char *cache_dir;    /* NULL: no disk cache; made when missing (nj_default_cache_dir) */
    uint64_t cache_max_bytes; /* bound of the disk cache; 0 = 256 MiB */
    const char *driver_path;  /* NULL: the system's libcuda / nvcuda.dll */
    const char *nvrtc_path;   /* NULL: searched for; else this file and no other */
    nj_log_fn log;            /* NULL: silent. May be called from any thread that calls us */
    void *log_user;
} nj_ctx_desc;

typedef struct nj_error_info {
    int32_t status;       /* nj_status of this thread's last failing call */
    int32_t driver_error; /* CUresult or nvrtcResult behind it, 0 when none */
    uint64_t needed,
        got; /* BUFFER_TOO_SMALL: elements. WORKSPACE_TOO_SMALL, max_workspace_bytes: bytes */
} nj_error_info;

/* ---- contexts ------------------------------------------------------------------------------- */

/* Makes a ctx. desc NULL = all defaults. A CUDA ctx binds to the CUDA context current in this
   thread when that is one of desc->device's, else it retains the device's primary context until it
   is gone. Errors: INVALID_ARGUMENT; LIBRARY_NOT_FOUND (no driver); UNSUPPORTED (no such device,
   too old a driver or device); DRIVER; OUT_OF_MEMORY. With AUTO a CUDA failure is logged and gives
   a host ctx. A missing NVRTC is no failure here: the embedded PTX serves. *out is NULL on failure.
 */
NJ_API nj_status nj_ctx_create(nj_ctx **out, const nj_ctx_desc *desc);

/* Releases the caller's hold. Plans stay valid: the ctx goes with the last of them. NULL is a
   no-op. The caller sees to it that no run of its plans is still executing when the last one goes.
 */
NJ_API void nj_ctx_destroy(nj_ctx *ctx);

/* NJ_BACKEND_CUDA or NJ_BACKEND_HOST; NJ_BACKEND_AUTO for NULL. Any thread. */
NJ_API nj_backend nj_ctx_backend(const nj_ctx *ctx);

/* One line about the ctx: backend, device, driver, NVRTC; for logs and bug reports. The text lives
   as long as the ctx. Any thread. */
NJ_API const char *nj_ctx_info(const nj_ctx *ctx);

/* Copies the counters. Errors: INVALID_ARGUMENT. Any thread. */
NJ_API nj_status nj_ctx_cache_stats(nj_ctx *ctx, nj_cache_stats *out);

/* Writes the conventional per-user cache folder for this library (XDG_CACHE_HOME or HOME on Unix,
   LOCALAPPDATA on Windows; the one function that reads the environment). Errors: INVALID_ARGUMENT;
   UNSUPPORTED when no variable is set; BUFFER_TOO_SMALL (needed and got in bytes). */
NJ_API nj_status nj_default_cache_dir(char *buffer, size_t size);

/* ---- plans ---------------------------------------------------------------------------------- */

/* Descriptor -> plan; compiles here, or hits a cache. pref NULL = no demands. The ctx's caches are
   locked: any thread may call, one compiles at a time. Not during stream capture in this thread or
   of the legacy stream: UNSUPPORTED. Synchronises with nothing, but for NJ_TUNE_MEASURE. Errors:
   INVALID_ARGUMENT, INVALID_PROBLEM, UNSUPPORTED, COMPILE_FAILED, DRIVER, OUT_OF_MEMORY; of the
   scratch memory WORKSPACE_TOO_SMALL and MISALIGNED_OPERAND. *out is NULL on failure. */
NJ_API nj_status nj_plan_select(nj_plan **out, nj_ctx *ctx, const nj_desc *desc,
                                const nj_preference *pref);

/* Bytes of pref.tune_scratch: with less than *least NJ_TUNE_MEASURE fails, more than *enough is not
   used. Between the two fewer rows are measured than the descriptor has, and from memory that may
   still lie in the device's cache. Both are 0 where there is nothing to choose from. pref NULL = no
   other demands; its tune and tune_* are not looked at. Errors: those of nj_plan_select that come
   before compiling. Both are 0 on failure. Any thread.

   With NJ_TUNE_MEASURE nj_plan_select compiles up to 4 geometries, runs each some 60 times on
   operands that it makes up within the scratch memory, and takes the fastest: the table's own,
   unless another is more than 2 % faster. It enqueues on pref.tune_stream and waits for that work;
   after an error of the driver, wait for the stream before you free the scratch memory. What it
   found is remembered in the ctx, and on disk when the ctx has a folder: by the number of rows and
   columns, the types, the device, the geometries, and the versions of NVRTC and of this library.
   Where that is so, nothing is measured and no scratch is needed. The host, the embedded PTX,
   shapes with one geometry and those without elements have nothing to measure either.

   Geometries differ in how rows are spread over the device, never in the order of a row's sums: y,
   dx, mean and rstd have the same bits whichever wins. dgamma and dbeta are summed in the winner's
   order: every run of one plan gives the same bits (nj_precision.deterministic), yet a plan that
   was measured elsewhere or anew may differ in the last ones, which
   nj_precision.bit_stable_on_same_hardware = 0 says. */
NJ_API nj_status nj_tune_scratch_size(nj_ctx *ctx, const nj_desc *desc, const nj_preference *pref,
                                      size_t *least, size_t *enough);

/* NULL is a no-op. The caller sees to it that no run of the plan is still executing. */
NJ_API void nj_plan_destroy(nj_plan *plan);

/* Every check that nj_plan_run makes (all but workspace and stream), and nothing else. Any thread.
 */
NJ_API nj_status nj_plan_can_implement(const nj_plan *plan, const nj_args *args);

/* Bytes of workspace for one run; may be 0. Its address: a multiple of 256 for CUDA (what
   cuMemAlloc gives), of 16 on the host (what malloc gives). Contents irrelevant before and after. 0
   for NULL. It holds partial sums, so it stays small. Bounds, pair = two f32 (f64 for f64) a
   column:

     CUDA  for dgamma, dbeta: 128 KiB a multiprocessor (16.5 MiB on 132), or one pair if that is
           more; for rows too long for one block or cluster, all of more than 4096 columns,
           besides 1/512 of x's bytes. For any operands, in whatever layout
     host  for dgamma, dbeta: 1 MiB, or 64 pairs if that is more, and room to align them */
NJ_API size_t nj_plan_workspace_size(const nj_plan *plan);

/* CUDA: enqueues on stream (a CUstream or cudaStream_t; NULL = the legacy default stream) and
   returns. Host: computes before it returns, with some 104 KB of stack on each thread; stream is
   ignored. Never compiles, allocates, synchronises or reads the environment: legal in stream
   capture, and from many threads on one plan, each run with its own workspace until it is done.

   Aliasing: an output may be the same view (data, offset, strides) as an input of its shape and
   type: y as x; dx as x or dy. Every other overlap of an output with an operand is an error where
   the addresses and strides prove it. Outputs need positive strides that nest: by growing stride,
   each steps past all that the smaller ones reach, so that an output does not overlap itself.
   Operands without elements may be NULL.

   NaN and Inf propagate as the formulas say, within their row and into the parameter gradients.
   No rows: dgamma and dbeta become 0 (or stay, when accumulating). No columns: mean and rstd become
   NaN (the mean of nothing), all else is empty. One column: dx is 0.

   Errors: those of the checks, before anything is written; DRIVER. */
NJ_API nj_status nj_plan_run(const nj_plan *plan, const nj_args *args, void *workspace,
                             size_t workspace_size, void *stream);

/* The kernel that runs for these args; args NULL = for packed operands. Errors: INVALID_ARGUMENT
   and, with args, those of nj_plan_can_implement. *out is zeroed on failure. Any thread. */
NJ_API nj_status nj_plan_sku(const nj_plan *plan, const nj_args *args, nj_sku *out);

/* Errors: INVALID_ARGUMENT. Any thread. */
NJ_API nj_status nj_plan_precision(const nj_plan *plan, nj_precision *out);

/* ---- shapes --------------------------------------------------------------------------------- */

/* All three check the descriptor's rank, shape and axes. Errors: INVALID_ARGUMENT. Any thread. */
NJ_API nj_status nj_desc_cols(const nj_desc *desc, int64_t *cols);
NJ_API nj_status nj_desc_stat_shape(const nj_desc *desc, int32_t *rank, int64_t shape[NJ_MAX_RANK]);
NJ_API nj_status nj_desc_param_shape(const nj_desc *desc, int32_t *rank,
                                     int64_t shape[NJ_MAX_RANK]);

/* Row-major views of a whole buffer: offset 0, count = product of the extents. Given NULL data, a
   rank outside 1..NJ_MAX_RANK or an overflowing shape they return a view that the checks reject. */
NJ_API nj_tensor nj_packed(void *data, int32_t rank, const int64_t *shape);
NJ_API nj_const_tensor nj_packed_const(const void *data, int32_t rank, const int64_t *shape);
NJ_API nj_const_tensor nj_as_const(nj_tensor tensor);

/* Bytes of one element; 0 for a value that is no type. */
NJ_API size_t nj_dtype_size(nj_dtype dtype);

/* ---- errors --------------------------------------------------------------------------------- */

/* "NJ_OK", "NJ_INVALID_ARGUMENT", ...; "unknown nj_status" for anything else. Any thread. */
NJ_API const char *nj_status_string(nj_status status);

/* The text of this thread's last failing call: `function: field = value: rule`. "" when none has
   failed. It lives until this thread's next failing call. */
NJ_API const char *nj_last_error(void);
NJ_API void nj_last_error_info(nj_error_info *out);

/* NJ_VERSION of the implementation that was linked. */
NJ_API int nj_version(void);
