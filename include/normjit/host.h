/* The host backend.

   Rows are taken in panels: up to NJI_HOST_ROWS rows by a chunk of columns. Operands in packed
   columns are read and written where they lie; others are converted and gathered into a panel that
   stays in the nearest cache. So the arithmetic below knows one layout, and strides are dealt with
   in one place.

   What a row's results depend on: its own values, the number of columns, the layout, the kind of
   processor; never the other rows or the number of threads. Parameter gradients: rows are split in
   parts by the sizes alone, one thread sums each part into the part's own partial sums, and these
   are added in order. */

#if (defined(__GNUC__) && __GNUC__ >= 9) || defined(__clang__)
#define NJI_HOST_VECTORS 1
#define NJI_ALWAYS_INLINE inline __attribute__((always_inline))
#define NJI_CACHE_ALIGNED __attribute__((aligned(64)))
#define NJI_PREFETCH(address) __builtin_prefetch(address)
#else
#define NJI_HOST_VECTORS 0
#define NJI_ALWAYS_INLINE inline
#define NJI_CACHE_ALIGNED
#define NJI_PREFETCH(address) ((void)0)
#endif

#if NJI_HOST_VECTORS && defined(__x86_64__)
#define NJI_HOST_X86 1
#include <immintrin.h>
#define NJI_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define NJI_TARGET_AVX512                                                                          \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#else
#define NJI_HOST_X86 0
#endif
#define NJI_TARGET_BASE

/* ---- sizes ---------------------------------------------------------------------------------- */

#define NJI_HOST_ROWS 32           /* rows of a panel, at most */
#define NJI_HOST_CHUNK_BYTES 4096  /* of a chunk of gamma: columns of a panel, at most */
#define NJI_HOST_PANEL_BYTES 24576 /* of a panel, without the padding of its rows */
#define NJI_HOST_PAD_BYTES 64      /* keeps panel rows out of each other's cache sets */
#define NJI_HOST_BUFFER_BYTES (NJI_HOST_PANEL_BYTES + NJI_HOST_ROWS * NJI_HOST_PAD_BYTES)

/* Tuned on memory-bound sizes; only speed depends on them. */
#define NJI_HOST_GROUP_BYTES 98304    /* of x in a panel's whole rows: in L2 till swept again */
#define NJI_HOST_SWEEP_COLS 8192      /* columns of one sum where all is in place */
#define NJI_HOST_SHORT_ROW 1024       /* bytes of a row; up to there ... */
#define NJI_HOST_SHORT_PANEL 4096     /* ... small panels let processors run ahead into the next */
#define NJI_HOST_PARALLEL_FROM 32768  /* elements; below it threads cost more than they save */
#define NJI_HOST_STREAM_FROM 16777216 /* bytes of an output that the last cache will not keep */

/* Parts of the rows: at most 64, or as many more as keep the partial sums within 1 MiB; 64 rows and
   more each, once there are enough for 8 parts. */
#define NJI_HOST_PARTS 64
#define NJI_HOST_PARTIAL_BYTES 1048576
#define NJI_HOST_PART_ROWS 64
#define NJI_HOST_LEAST_PARTS 8
#define NJI_HOST_FINISH_COLS 64 /* columns whose partial sums one task adds up */

/* ---- element types -------------------------------------------------------------------------- */

static NJI_ALWAYS_INLINE float nji_f32_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static NJI_ALWAYS_INLINE uint32_t nji_bits_from_f32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static NJI_ALWAYS_INLINE float nji_f32_from_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t rest = (uint32_t)(half & 0x7fffu) << 13; /* exponent and mantissa in f32's places */
    if (rest < 0x00800000u) { /* subnormal: put 2^-14 in front, then take it away */
        float value = nji_f32_from_bits(rest + 0x38800000u) - nji_f32_from_bits(0x38800000u);
        return nji_f32_from_bits(sign | nji_bits_from_f32(value));
    }
    if (rest >= 0x0f800000u) rest += 0x38000000u; /* inf, NaN: exponent 31 becomes 255 */
    return nji_f32_from_bits(sign | (rest + 0x38000000u));
}

static NJI_ALWAYS_INLINE uint16_t nji_f16_from_f32(float value) {
    uint32_t bits = nji_bits_from_f32(value), sign = (bits >> 16) & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((bits >> 13) & 0x3ffu));
    if (bits >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds to 65536 or more */
    if (bits < 0x38800000u) { /* subnormal: the ulp of 0.5 is f16's smallest step, 2^-24 */
        bits = nji_bits_from_f32(nji_f32_from_bits(bits) + 0.5f) - 0x3f000000u;
        return (uint16_t)(sign | bits);
    }
    bits += 0xfffu + ((bits >> 13) & 1u); /* half an ulp, to even */
    return (uint16_t)(sign | ((bits - 0x38000000u) >> 13));
}

static NJI_ALWAYS_INLINE float nji_f32_from_bf16(uint16_t half) {
    return nji_f32_from_bits((uint32_t)half << 16);
}

static NJI_ALWAYS_INLINE uint16_t nji_bf16_from_f32(float value) {
    uint32_t bits = nji_bits_from_f32(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* f64 -> f32 rounded to odd: a second rounding, to f16 or bf16, then gives what one would. */
static NJI_ALWAYS_INLINE float nji_f32_to_odd(double value) {
    float near = (float)value;
    uint32_t bits = nji_bits_from_f32(near);
    if ((double)near == value || value != value || (bits & 1u)) return near;
    return nji_f32_from_bits(fabs((double)near) > fabs(value) ? bits - 1 : bits + 1);
}

#define nji_copy_value(value) (value)
#define nji_f16_from_f64(value) nji_f16_from_f32(nji_f32_to_odd(value))
#define nji_bf16_from_f64(value) nji_bf16_from_f32(nji_f32_to_odd(value))

/* Copies rows x cols elements, converting. Row r starts at offset from_row[r], to_row[r]; columns
   are from_col, to_col apart (elements). along_rows: neighbouring rows one after the other. */
typedef void (*nji_host_copy)(const void *from, const int64_t *from_row, int64_t from_col, void *to,
                              const int64_t *to_row, int64_t to_col, int rows, int64_t cols,
                              int along_rows);

#define NJI_HOST_COPY(name, source, target, convert)                                               \
    static void nji_host_copy_##name(const void *from, const int64_t *from_row, int64_t from_col,  \
                                     void *to, const int64_t *to_row, int64_t to_col, int rows,    \
                                     int64_t cols, int along_rows) {                               \
        const source *in = (const source *)from;                                                   \
        target *out = (target *)to;                                                                \
        int64_t c;                                                                                 \
        int r;                                                                                     \
        if (along_rows) {                                                                          \
            for (c = 0; c < cols; c++)                                                             \
                for (r = 0; r < rows; r++)                                                         \
                    out[to_row[r] + c * to_col] = (target)convert(in[from_row[r] + c * from_col]); \
            return;                                                                                \
        }                                                                                          \
        for (r = 0; r < rows; r++) {                                                               \
            const source *a = in + from_row[r];                                                    \
            target *b = out + to_row[r];                                                           \
            for (c = 0; c < cols; c++)                                                             \
                b[c * to_col] = (target)convert(a[c * from_col]);                                  \
        }                                                                                          \
    }

NJI_HOST_COPY(float_f16, uint16_t, float, nji_f32_from_f16)
NJI_HOST_COPY(float_bf16, uint16_t, float, nji_f32_from_bf16)
NJI_HOST_COPY(float_f32, float, float, nji_copy_value)
NJI_HOST_COPY(double_f16, uint16_t, double, nji_f32_from_f16)
NJI_HOST_COPY(double_bf16, uint16_t, double, nji_f32_from_bf16)
NJI_HOST_COPY(double_f32, float, double, nji_copy_value)
NJI_HOST_COPY(double_f64, double, double, nji_copy_value)
NJI_HOST_COPY(f16_float, float, uint16_t, nji_f16_from_f32)
NJI_HOST_COPY(bf16_float, float, uint16_t, nji_bf16_from_f32)
NJI_HOST_COPY(f16_double, double, uint16_t, nji_f16_from_f64)
NJI_HOST_COPY(bf16_double, double, uint16_t, nji_bf16_from_f64)
NJI_HOST_COPY(f32_double, double, float, nji_copy_value)

/* By nj_dtype; [0] for arithmetic in float, [1] in double. */
typedef struct nji_host_type {
    int size;
    nji_host_copy load[2], store[2];
} nji_host_type;

static const nji_host_type nji_host_types[] = {
    {0, {NULL, NULL}, {NULL, NULL}},
    {2,
     {nji_host_copy_float_f16, nji_host_copy_double_f16},
     {nji_host_copy_f16_float, nji_host_copy_f16_double}},
    {2,
     {nji_host_copy_float_bf16, nji_host_copy_double_bf16},
     {nji_host_copy_bf16_float, nji_host_copy_bf16_double}},
    {4,
     {nji_host_copy_float_f32, nji_host_copy_double_f32},
     {nji_host_copy_float_f32, nji_host_copy_f32_double}},
    {8, {NULL, nji_host_copy_double_f64}, {NULL, nji_host_copy_double_f64}}};

/* ---- arithmetic ----------------------------------------------------------------------------- */

/* Some rows and a chunk of their columns. `real` below: the type of the arithmetic. */
typedef struct nji_host_panel {
    const void *x[NJI_HOST_ROWS], *dy[NJI_HOST_ROWS]; /* each row's chunk */
    void *out[NJI_HOST_ROWS];                         /* y or dx; may be x or dy */
    const void *gamma, *beta;                         /* the chunk of each; never null */
    void *dgamma, *dbeta;                             /* partial sums of the chunk, added to */
    int64_t ahead;  /* bytes from a row of x to the row that forward prefetches; 0: none */
    int begin, end; /* the rows in hand */
    /* By row. The sums grow from chunk to chunk; in double, so chunks add no error of their own. */
    double sum[NJI_HOST_ROWS], square[NJI_HOST_ROWS];
    double center[NJI_HOST_ROWS]; /* of type real: the mean, or close to it */
    double shift[NJI_HOST_ROWS];  /* xhat = (x - center) * rstd + shift */
    double rstd[NJI_HOST_ROWS];
    double scale[NJI_HOST_ROWS]; /* dx = scale * (g - mean_g - xhat * mean_gx) */
    double mean_g[NJI_HOST_ROWS], mean_gx[NJI_HOST_ROWS];
} nji_host_panel;

/* One set for each element type and instruction set. `cols` is the chunk's. */
typedef struct nji_host_math {
    void (*sum)(nji_host_panel *panel, int64_t cols);             /* sum += x */
    void (*moments)(nji_host_panel *panel, int64_t cols);         /* sum, square of x-center */
    void (*forward)(const nji_host_panel *panel, int64_t cols);   /* out = y */
    void (*backward_sums)(nji_host_panel *panel, int64_t cols);   /* sum += g, square += g*xhat */
    void (*dx)(const nji_host_panel *panel, int64_t cols);        /* out = dx */
    void (*params)(const nji_host_panel *panel, int64_t cols);    /* dgamma, dbeta */
    void (*dx_params)(const nji_host_panel *panel, int64_t cols); /* both, reading once */
} nji_host_math;

#if NJI_HOST_VECTORS
/* Vectors as they lie in memory: aligned as their elements, and free to alias them. */
#define NJI_VECTOR(name, element, bytes)                                                           \
    typedef element name __attribute__((vector_size(bytes), aligned(sizeof(element)), may_alias))
NJI_VECTOR(nji_float_base, float, 16);
NJI_VECTOR(nji_double_base, double, 16);
#define NJI_BASE_LANES_float 4
#define NJI_BASE_LANES_double 2
#define NJI_LANES_float(v) (((v)[0] + (v)[2]) + ((v)[1] + (v)[3]))
#define NJI_LANES_double(v) ((v)[0] + (v)[1])
#if NJI_HOST_X86
NJI_VECTOR(nji_float_avx2, float, 32);
NJI_VECTOR(nji_double_avx2, double, 32);
NJI_VECTOR(nji_u32_avx2, uint32_t, 32);
NJI_VECTOR(nji_float_avx512, float, 64);
NJI_VECTOR(nji_double_avx512, double, 64);
NJI_VECTOR(nji_u32_avx512, uint32_t, 64);
#endif
#else
typedef float nji_float_base;
typedef double nji_double_base;
#define NJI_BASE_LANES_float 1
#define NJI_BASE_LANES_double 1
#define NJI_LANES_float(v) (v)
#define NJI_LANES_double(v) (v)
#endif

#define NJI_AT(vec, pointer) (*(vec *)(pointer))
#define NJI_READ(vec, pointer) (*(const vec *)(pointer))

/* The sum of a vector's lanes: first of its pieces of 16 bytes, then of the lanes of one. */
#define NJI_PIECES_1(p) ((p)[0])
#define NJI_PIECES_2(p) ((p)[0] + (p)[1])
#define NJI_PIECES_4(p) (NJI_PIECES_2(p) + NJI_PIECES_2((p) + 2))

/* Elements as they are stored. GET1 and PUT1 convert one from and to the type of the arithmetic,
   GET and PUT a vector of them. */
typedef uint16_t nji_stored_f16;
typedef uint16_t nji_stored_bf16;
typedef float nji_stored_f32;
typedef double nji_stored_f64;

#define NJI_GET1_f16(p) nji_f32_from_f16(*(p))
#define NJI_GET1_bf16(p) nji_f32_from_bf16(*(p))
#define NJI_GET1_f32(p) (*(p))
#define NJI_GET1_f64(p) (*(p))
#define NJI_PUT1_f16(p, value) (*(p) = nji_f16_from_f32(value))
#define NJI_PUT1_bf16(p, value) (*(p) = nji_bf16_from_f32(value))
#define NJI_PUT1_f32(p, value) (*(p) = (value))
#define NJI_PUT1_f64(p, value) (*(p) = (value))

#define NJI_GET_f32_base(p) NJI_READ(nji_float_base, p)
#define NJI_GET_f64_base(p) NJI_READ(nji_double_base, p)
#define NJI_PUT_f32_base(p, value) (NJI_AT(nji_float_base, p) = (value))
#define NJI_PUT_f64_base(p, value) (NJI_AT(nji_double_base, p) = (value))

#if NJI_HOST_X86
#define NJI_GET_f32_avx2(p) NJI_READ(nji_float_avx2, p)
#define NJI_GET_f64_avx2(p) NJI_READ(nji_double_avx2, p)
#define NJI_PUT_f32_avx2(p, value) (NJI_AT(nji_float_avx2, p) = (value))
#define NJI_PUT_f64_avx2(p, value) (NJI_AT(nji_double_avx2, p) = (value))
#define NJI_GET_f32_avx512(p) NJI_READ(nji_float_avx512, p)
#define NJI_GET_f64_avx512(p) NJI_READ(nji_double_avx512, p)
#define NJI_PUT_f32_avx512(p, value) (NJI_AT(nji_float_avx512, p) = (value))
#define NJI_PUT_f64_avx512(p, value) (NJI_AT(nji_double_avx512, p) = (value))

/* The masked forms, since g++ 12 takes the plain ones' own "undefined" operand for our mistake. */
#define NJI_GET_f16_avx2(p) ((nji_float_avx2)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p))))
#define NJI_GET_f16_avx512(p)                                                                      \
    ((nji_float_avx512)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i *)(p))))
#define NJI_PUT_f16_avx2(p, value)                                                                 \
    _mm_storeu_si128((__m128i *)(p), _mm256_cvtps_ph((__m256)(value), _MM_FROUND_TO_NEAREST_INT))
#define NJI_PUT_f16_avx512(p, value)                                                               \
    _mm256_storeu_si256((__m256i *)(p),                                                            \
                        _mm512_maskz_cvtps_ph(0xffff, (__m512)(value), _MM_FROUND_TO_NEAREST_INT))

#define NJI_WIDEN_avx2(p)                                                                          \
    ((nji_u32_avx2)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define NJI_WIDEN_avx512(p)                                                                        \
    ((nji_u32_avx512)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256((const __m256i *)(p))))
/* Packing works by 128 bits: of four quarters, the first and the third are wanted. */
#define NJI_NARROW_avx2(p, bits)                                                                   \
    _mm_storeu_si128((__m128i *)(p),                                                               \
                     _mm256_castsi256_si128(_mm256_permute4x64_epi64(                              \
                         _mm256_packus_epi32((__m256i)(bits), (__m256i)(bits)), 0xd8)))
#define NJI_NARROW_avx512(p, bits)                                                                 \
    _mm256_storeu_si256((__m256i *)(p), _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)(bits)))

#define NJI_GET_bf16_avx2(p) ((nji_float_avx2)(NJI_WIDEN_avx2(p) << 16))
#define NJI_GET_bf16_avx512(p) ((nji_float_avx512)(NJI_WIDEN_avx512(p) << 16))
#define NJI_PUT_bf16_avx2(p, value) NJI_PUT_BF16(avx2, p, value)
#define NJI_PUT_bf16_avx512(p, value) NJI_PUT_BF16(avx512, p, value)

/* nji_bf16_from_f32 on every lane. (AVX512-BF16's own instruction takes subnormals for zero.) */
#define NJI_PUT_BF16(isa, p, value)                                                                \
    do {                                                                                           \
        nji_float_##isa wide = (value);                                                            \
        nji_u32_##isa bits = (nji_u32_##isa)wide, high = bits >> 16;                               \
        nji_u32_##isa is_nan = (nji_u32_##isa)(wide != wide);                                      \
        nji_u32_##isa near = (bits + 0x7fffu + (high & 1u)) >> 16;                                 \
        near = (near & ~is_nan) | ((high | 0x40u) & is_nan);                                       \
        NJI_NARROW_##isa(p, near);                                                                 \
    } while (0)
#endif

/* The k-th vector of a tile of columns, in one row of the backward pass. */
#define NJI_HOST_STEP(vec, k, lanes, GET, PUT)                                                     \
    {                                                                                              \
        vec t = GET(dy + (k) * (lanes)), h = (GET(x + (k) * (lanes)) - center) * rstd;             \
        if (want_params) {                                                                         \
            dgamma##k += t * h;                                                                    \
            dbeta##k += t;                                                                         \
        }                                                                                          \
        if (want_dx) PUT(out + (k) * (lanes), ((t * gamma##k - mean_g) - h * mean_gx) * scale);    \
    }

/* The rows of a panel over one tile of columns; `steps` names the tile's vectors. The sums over the
   rows are kept in registers and added to memory once, which also keeps their error small. */
#define NJI_HOST_BACKWARD_ROWS(stored, real, steps)                                                \
    for (r = panel->begin; r < panel->end; r++) {                                                  \
        const stored *x = (const stored *)panel->x[r] + c, *dy = (const stored *)panel->dy[r] + c; \
        stored *out = want_dx ? (stored *)panel->out[r] + c : NULL;                                \
        real center = row[r].center, rstd = row[r].rstd, scale = row[r].scale;                     \
        real mean_g = row[r].mean_g, mean_gx = row[r].mean_gx;                                     \
        steps                                                                                      \
    }

#define NJI_HOST_OPEN(vec, k, lanes)                                                               \
    vec dgamma##k = {0}, dbeta##k = {0}, gamma##k = NJI_READ(vec, gamma + c + (k) * (lanes));

#define NJI_HOST_CLOSE(vec, k, lanes)                                                              \
    if (want_params) {                                                                             \
        NJI_AT(vec, dgamma + c + (k) * (lanes)) += dgamma##k;                                      \
        NJI_AT(vec, dbeta + c + (k) * (lanes)) += dbeta##k;                                        \
    }

/* C has no templates: this text is what adds up, for one type and one instruction set. */
#define NJI_HOST_ADDS(isa, TARGET, real, lanes, pieces)                                            \
    TARGET static NJI_ALWAYS_INLINE double nji_host_lanes_##real##_##isa(                          \
        const nji_##real##_##isa *vector) {                                                        \
        const nji_##real##_base *piece = (const nji_##real##_base *)vector;                        \
        nji_##real##_base sum = NJI_PIECES_##pieces(piece);                                        \
        return (double)NJI_LANES_##real(sum);                                                      \
    }                                                                                              \
                                                                                                   \
    TARGET static void nji_host_add_##real##_##isa(void *to, const void *from, int64_t cols) {     \
        typedef nji_##real##_##isa vec;                                                            \
        real *a = (real *)to;                                                                      \
        const real *b = (const real *)from;                                                        \
        int64_t c = 0;                                                                             \
        for (; c + lanes <= cols; c += lanes)                                                      \
            NJI_AT(vec, a + c) += NJI_READ(vec, b + c);                                            \
        for (; c < cols; c++)                                                                      \
            a[c] += b[c];                                                                          \
    }                                                                                              \
                                                                                                   \
    TARGET static void nji_host_add_wide_##real##_##isa(double *to, const void *from,              \
                                                        int64_t cols) {                            \
        const real *b = (const real *)from;                                                        \
        int64_t c;                                                                                 \
        for (c = 0; c + 4 <= cols; c += 4) {                                                       \
            to[c] += (double)b[c];                                                                 \
            to[c + 1] += (double)b[c + 1];                                                         \
            to[c + 2] += (double)b[c + 2];                                                         \
            to[c + 3] += (double)b[c + 3];                                                         \
        }                                                                                          \
        for (; c < cols; c++)                                                                      \
            to[c] += (double)b[c];                                                                 \
    }

/* And this is the arithmetic, for rows of one element type. Columns go by four vectors or two, then
   by one, then one by one: where a column falls depends on its place alone. */
#define NJI_HOST_MATH(isa, TARGET, elem, real, lanes)                                              \
    TARGET static void nji_host_sum_##elem##_##isa(nji_host_panel *panel, int64_t cols) {          \
        typedef nji_##real##_##isa vec;                                                            \
        int r;                                                                                     \
        for (r = panel->begin; r < panel->end; r++) {                                              \
            const nji_stored_##elem *x = (const nji_stored_##elem *)panel->x[r];                   \
            vec a = {0}, b = {0}, d = {0}, e = {0};                                                \
            real rest = 0;                                                                         \
            int64_t c = 0;                                                                         \
            for (; c + 4 * lanes <= cols; c += 4 * lanes) {                                        \
                a += NJI_GET_##elem##_##isa(x + c);                                                \
                b += NJI_GET_##elem##_##isa(x + c + lanes);                                        \
                d += NJI_GET_##elem##_##isa(x + c + 2 * lanes);                                    \
                e += NJI_GET_##elem##_##isa(x + c + 3 * lanes);                                    \
            }                                                                                      \
            for (; c + lanes <= cols; c += lanes)                                                  \
                a += NJI_GET_##elem##_##isa(x + c);                                                \
            for (; c < cols; c++)                                                                  \
                rest += NJI_GET1_##elem(x + c);                                                    \
            a = (a + b) + (d + e);                                                                 \
            panel->sum[r] += nji_host_lanes_##real##_##isa(&a) + (double)rest;                     \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    TARGET static void nji_host_moments_##elem##_##isa(nji_host_panel *panel, int64_t cols) {      \
        typedef nji_##real##_##isa vec;                                                            \
        int r;                                                                                     \
        for (r = panel->begin; r < panel->end; r++) {                                              \
            const nji_stored_##elem *x = (const nji_stored_##elem *)panel->x[r];                   \
            real center = (real)panel->center[r], rest = 0, rest2 = 0;                             \
            vec a = {0}, b = {0}, a2 = {0}, b2 = {0};                                              \
            int64_t c = 0;                                                                         \
            for (; c + 2 * lanes <= cols; c += 2 * lanes) {                                        \
                vec d = NJI_GET_##elem##_##isa(x + c) - center,                                    \
                    e = NJI_GET_##elem##_##isa(x + c + lanes) - center;                            \
                a += d;                                                                            \
                a2 += d * d;                                                                       \
                b += e;                                                                            \
                b2 += e * e;                                                                       \
            }                                                                                      \
            for (; c + lanes <= cols; c += lanes) {                                                \
                vec d = NJI_GET_##elem##_##isa(x + c) - center;                                    \
                a += d;                                                                            \
                a2 += d * d;                                                                       \
            }                                                                                      \
            for (; c < cols; c++) {                                                                \
                real d = NJI_GET1_##elem(x + c) - center;                                          \
                rest += d;                                                                         \
                rest2 += d * d;                                                                    \
            }                                                                                      \
            a += b;                                                                                \
            a2 += b2;                                                                              \
            panel->sum[r] += nji_host_lanes_##real##_##isa(&a) + (double)rest;                     \
            panel->square[r] += nji_host_lanes_##real##_##isa(&a2) + (double)rest2;                \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    TARGET static void nji_host_forward_##elem##_##isa(const nji_host_panel *panel,                \
                                                       int64_t cols) {                             \
        typedef nji_##real##_##isa vec;                                                            \
        const real *gamma = (const real *)panel->gamma, *beta = (const real *)panel->beta;         \
        int r;                                                                                     \
        for (r = panel->begin; r < panel->end; r++) {                                              \
            const nji_stored_##elem *x = (const nji_stored_##elem *)panel->x[r];                   \
            nji_stored_##elem *y = (nji_stored_##elem *)panel->out[r];                             \
            real center = (real)panel->center[r], shift = (real)panel->shift[r];                   \
            real rstd = (real)panel->rstd[r];                                                      \
            int64_t c = 0;                                                                         \
            for (; c + lanes <= cols; c += lanes) {                                                \
                vec h = (NJI_GET_##elem##_##isa(x + c) - center) * rstd + shift;                   \
                NJI_PREFETCH((const char *)(x + c) + panel->ahead);                                \
                NJI_PUT_##elem##_##isa(y + c,                                                      \
                                       h * NJI_READ(vec, gamma + c) + NJI_READ(vec, beta + c));    \
            }                                                                                      \
            for (; c < cols; c++)                                                                  \
                NJI_PUT1_##elem(y + c,                                                             \
                                ((NJI_GET1_##elem(x + c) - center) * rstd + shift) * gamma[c] +    \
                                    beta[c]);                                                      \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    TARGET static void nji_host_backward_sums_##elem##_##isa(nji_host_panel *panel,                \
                                                             int64_t cols) {                       \
        typedef nji_##real##_##isa vec;                                                            \
        const real *gamma = (const real *)panel->gamma;                                            \
        int r;                                                                                     \
        for (r = panel->begin; r < panel->end; r++) {                                              \
            const nji_stored_##elem *x = (const nji_stored_##elem *)panel->x[r],                   \
                                    *dy = (const nji_stored_##elem *)panel->dy[r];                 \
            real center = (real)panel->center[r], rstd = (real)panel->rstd[r], rest = 0,           \
                 rest2 = 0;                                                                        \
            vec a = {0}, b = {0}, a2 = {0}, b2 = {0};                                              \
            int64_t c = 0;                                                                         \
            for (; c + 2 * lanes <= cols; c += 2 * lanes) {                                        \
                vec g = NJI_GET_##elem##_##isa(dy + c) * NJI_READ(vec, gamma + c);                 \
                vec f = NJI_GET_##elem##_##isa(dy + c + lanes) * NJI_READ(vec, gamma + c + lanes); \
                a += g;                                                                            \
                a2 += g * ((NJI_GET_##elem##_##isa(x + c) - center) * rstd);                       \
                b += f;                                                                            \
                b2 += f * ((NJI_GET_##elem##_##isa(x + c + lanes) - center) * rstd);               \
            }                                                                                      \
            for (; c + lanes <= cols; c += lanes) {                                                \
                vec g = NJI_GET_##elem##_##isa(dy + c) * NJI_READ(vec, gamma + c);                 \
                a += g;                                                                            \
                a2 += g * ((NJI_GET_##elem##_##isa(x + c) - center) * rstd);                       \
            }                                                                                      \
            for (; c < cols; c++) {                                                                \
                real g = NJI_GET1_##elem(dy + c) * gamma[c];                                       \
                rest += g;                                                                         \
                rest2 += g * ((NJI_GET1_##elem(x + c) - center) * rstd);                           \
            }                                                                                      \
            a += b;                                                                                \
            a2 += b2;                                                                              \
            panel->sum[r] += nji_host_lanes_##real##_##isa(&a) + (double)rest;                     \
            panel->square[r] += nji_host_lanes_##real##_##isa(&a2) + (double)rest2;                \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    TARGET static NJI_ALWAYS_INLINE void nji_host_backward_##elem##_##isa(                         \
        const nji_host_panel *panel, int64_t cols, int want_dx, int want_params) {                 \
        typedef nji_##real##_##isa vec;                                                            \
        const real *gamma = (const real *)panel->gamma;                                            \
        real *dgamma = (real *)panel->dgamma, *dbeta = (real *)panel->dbeta;                       \
        struct {                                                                                   \
            real center, rstd, scale, mean_g, mean_gx;                                             \
        } row[NJI_HOST_ROWS];                                                                      \
        int64_t c = 0;                                                                             \
        int r;                                                                                     \
        for (r = panel->begin; r < panel->end; r++) {                                              \
            row[r].center = (real)panel->center[r];                                                \
            row[r].rstd = (real)panel->rstd[r];                                                    \
            row[r].scale = (real)panel->scale[r];                                                  \
            row[r].mean_g = (real)panel->mean_g[r];                                                \
            row[r].mean_gx = (real)panel->mean_gx[r];                                              \
        }                                                                                          \
        for (; c + 4 * lanes <= cols; c += 4 * lanes) {                                            \
            NJI_HOST_OPEN(vec, 0, lanes)                                                           \
            NJI_HOST_OPEN(vec, 1, lanes)                                                           \
            NJI_HOST_OPEN(vec, 2, lanes)                                                           \
            NJI_HOST_OPEN(vec, 3, lanes)                                                           \
            NJI_HOST_BACKWARD_ROWS(                                                                \
                nji_stored_##elem, real,                                                           \
                NJI_HOST_STEP(vec, 0, lanes, NJI_GET_##elem##_##isa, NJI_PUT_##elem##_##isa)       \
                    NJI_HOST_STEP(vec, 1, lanes, NJI_GET_##elem##_##isa, NJI_PUT_##elem##_##isa)   \
                        NJI_HOST_STEP(vec, 2, lanes, NJI_GET_##elem##_##isa,                       \
                                      NJI_PUT_##elem##_##isa)                                      \
                            NJI_HOST_STEP(vec, 3, lanes, NJI_GET_##elem##_##isa,                   \
                                          NJI_PUT_##elem##_##isa))                                 \
            NJI_HOST_CLOSE(vec, 0, lanes)                                                          \
            NJI_HOST_CLOSE(vec, 1, lanes)                                                          \
            NJI_HOST_CLOSE(vec, 2, lanes)                                                          \
            NJI_HOST_CLOSE(vec, 3, lanes)                                                          \
        }                                                                                          \
        for (; c + lanes <= cols; c += lanes) {                                                    \
            NJI_HOST_OPEN(vec, 0, lanes)                                                           \
            NJI_HOST_BACKWARD_ROWS(                                                                \
                nji_stored_##elem, real,                                                           \
                NJI_HOST_STEP(vec, 0, lanes, NJI_GET_##elem##_##isa, NJI_PUT_##elem##_##isa))      \
            NJI_HOST_CLOSE(vec, 0, lanes)                                                          \
        }                                                                                          \
        for (; c < cols; c++) {                                                                    \
            NJI_HOST_OPEN(real, 0, 1)                                                              \
            NJI_HOST_BACKWARD_ROWS(nji_stored_##elem, real,                                        \
                                   NJI_HOST_STEP(real, 0, 1, NJI_GET1_##elem, NJI_PUT1_##elem))    \
            NJI_HOST_CLOSE(real, 0, 1)                                                             \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    TARGET static void nji_host_dx_##elem##_##isa(const nji_host_panel *panel, int64_t cols) {     \
        nji_host_backward_##elem##_##isa(panel, cols, 1, 0);                                       \
    }                                                                                              \
    TARGET static void nji_host_params_##elem##_##isa(const nji_host_panel *panel, int64_t cols) { \
        nji_host_backward_##elem##_##isa(panel, cols, 0, 1);                                       \
    }                                                                                              \
    TARGET static void nji_host_dx_params_##elem##_##isa(const nji_host_panel *panel,              \
                                                         int64_t cols) {                           \
        nji_host_backward_##elem##_##isa(panel, cols, 1, 1);                                       \
    }

#define NJI_HOST_MATH_TABLE(isa, elem)                                                             \
    {                                                                                              \
        nji_host_sum_##elem##_##isa, nji_host_moments_##elem##_##isa,                              \
            nji_host_forward_##elem##_##isa, nji_host_backward_sums_##elem##_##isa,                \
            nji_host_dx_##elem##_##isa, nji_host_params_##elem##_##isa,                            \
            nji_host_dx_params_##elem##_##isa                                                      \
    }

/* Packed rows of 16-bit elements from and to float. */
#define NJI_HOST_ROWS_OF(isa, TARGET, elem, lanes)                                                 \
    TARGET static void nji_host_load_##elem##_##isa(const void *from, void *to, int64_t count) {   \
        const nji_stored_##elem *in = (const nji_stored_##elem *)from;                             \
        float *out = (float *)to;                                                                  \
        int64_t i = 0;                                                                             \
        for (; i + lanes <= count; i += lanes)                                                     \
            NJI_AT(nji_float_##isa, out + i) = NJI_GET_##elem##_##isa(in + i);                     \
        for (; i < count; i++)                                                                     \
            out[i] = NJI_GET1_##elem(in + i);                                                      \
    }                                                                                              \
                                                                                                   \
    TARGET static void nji_host_store_##elem##_##isa(const void *from, void *to, int64_t count) {  \
        const float *in = (const float *)from;                                                     \
        nji_stored_##elem *out = (nji_stored_##elem *)to;                                          \
        int64_t i = 0;                                                                             \
        for (; i + lanes <= count; i += lanes)                                                     \
            NJI_PUT_##elem##_##isa(out + i, NJI_READ(nji_float_##isa, in + i));                    \
        for (; i < count; i++)                                                                     \
            NJI_PUT1_##elem(out + i, in[i]);                                                       \
    }

/* ---- instruction sets ----------------------------------------------------------------------- */

typedef void (*nji_host_row_copy)(const void *from, void *to, int64_t count);

/* Tables by nj_dtype, and by the arithmetic: float, double. */
typedef struct nji_host_isa {
    const char *name;
    int vector_bytes;
    nji_host_math math[NJ_F64 + 1];                           /* all NULL: convert to float first */
    void (*add[2])(void *to, const void *from, int64_t cols); /* to += from */
    void (*add_wide[2])(double *to, const void *from, int64_t cols); /* the same */
    nji_host_row_copy load[NJ_F64 + 1], store[NJ_F64 + 1]; /* from, to float; may be NULL */
    nji_host_row_copy stream;                              /* bytes, past the caches; may be NULL */
} nji_host_isa;

#define NJI_HOST_NO_MATH                                                                           \
    { NULL, NULL, NULL, NULL, NULL, NULL, NULL }

NJI_HOST_ADDS(base, NJI_TARGET_BASE, float, NJI_BASE_LANES_float, 1)
NJI_HOST_ADDS(base, NJI_TARGET_BASE, double, NJI_BASE_LANES_double, 1)
NJI_HOST_MATH(base, NJI_TARGET_BASE, f32, float, NJI_BASE_LANES_float)
NJI_HOST_MATH(base, NJI_TARGET_BASE, f64, double, NJI_BASE_LANES_double)

static const nji_host_isa nji_host_base = {
    "baseline",
    16,
    {NJI_HOST_NO_MATH, NJI_HOST_NO_MATH, NJI_HOST_NO_MATH, NJI_HOST_MATH_TABLE(base, f32),
     NJI_HOST_MATH_TABLE(base, f64)},
    {nji_host_add_float_base, nji_host_add_double_base},
    {nji_host_add_wide_float_base, nji_host_add_wide_double_base},
    {NULL, NULL, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
    NULL};

#if NJI_HOST_X86
/* Whole cache lines go past the caches: they need not be read before they are written. */
NJI_TARGET_AVX2 static void nji_host_stream(const void *from, void *to, int64_t count) {
    const char *in = (const char *)from;
    char *out = (char *)to;
    int64_t i = nji_min_i64((int64_t)((64 - ((uintptr_t)out & 63)) & 63), count);
    memcpy(out, in, (size_t)i);
    for (; i + 64 <= count; i += 64) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(in + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(in + i + 32));
        _mm256_stream_si256((__m256i *)(out + i), a);
        _mm256_stream_si256((__m256i *)(out + i + 32), b);
    }
    memcpy(out + i, in + i, (size_t)(count - i));
}

#define NJI_HOST_ISA(isa, TARGET, text, lanes, wide_lanes, pieces)                                 \
    NJI_HOST_ADDS(isa, TARGET, float, lanes, pieces)                                               \
    NJI_HOST_ADDS(isa, TARGET, double, wide_lanes, pieces)                                         \
    NJI_HOST_MATH(isa, TARGET, f16, float, lanes)                                                  \
    NJI_HOST_MATH(isa, TARGET, bf16, float, lanes)                                                 \
    NJI_HOST_MATH(isa, TARGET, f32, float, lanes)                                                  \
    NJI_HOST_MATH(isa, TARGET, f64, double, wide_lanes)                                            \
    NJI_HOST_ROWS_OF(isa, TARGET, f16, lanes)                                                      \
    NJI_HOST_ROWS_OF(isa, TARGET, bf16, lanes)                                                     \
                                                                                                   \
    static const nji_host_isa nji_host_##isa = {                                                   \
        text,                                                                                      \
        16 * pieces,                                                                               \
        {NJI_HOST_NO_MATH, NJI_HOST_MATH_TABLE(isa, f16), NJI_HOST_MATH_TABLE(isa, bf16),          \
         NJI_HOST_MATH_TABLE(isa, f32), NJI_HOST_MATH_TABLE(isa, f64)},                            \
        {nji_host_add_float_##isa, nji_host_add_double_##isa},                                     \
        {nji_host_add_wide_float_##isa, nji_host_add_wide_double_##isa},                           \
        {NULL, nji_host_load_f16_##isa, nji_host_load_bf16_##isa, NULL, NULL},                     \
        {NULL, nji_host_store_f16_##isa, nji_host_store_bf16_##isa, NULL, NULL},                   \
        nji_host_stream};

NJI_HOST_ISA(avx2, NJI_TARGET_AVX2, "AVX2", 8, 4, 2)
NJI_HOST_ISA(avx512, NJI_TARGET_AVX512, "AVX-512", 16, 8, 4)
#endif

/* Every processor with AVX2 and FMA has F16C too. */
static const nji_host_isa *nji_host_pick_isa(void) {
#if NJI_HOST_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
            return &nji_host_avx512;
        return &nji_host_avx2;
    }
#endif
    return &nji_host_base;
}

static void nji_host_fence(void) {
#if NJI_HOST_X86
    _mm_sfence();
#endif
}

/* ---- a run's plan of work ------------------------------------------------------------------- */

/* An operand, with what moving it needs. */
typedef struct nji_host_view {
    char *data; /* NULL: absent */
    const long long *row_stride, *col_stride;
    const nji_host_type *type;
    int dtype;
    int packed_cols; /* unit-stride columns */
    int direct;      /* used in place: also of the panel's type (gamma, beta: the arithmetic's) */
    int along_rows;  /* neighbouring rows lie closer than neighbouring columns */
} nji_host_view;

typedef struct nji_host_job {
    const nji_problem *problem;
    const nji_host_isa *isa;
    const nji_host_math *math;
    nji_host_view x, dy, gamma, beta, out, dgamma, dbeta; /* out: y or dx */
    int stat_dtype;
    int wide;          /* arithmetic in double */
    int64_t real_size; /* bytes of float or double */
    int panel_dtype;   /* of x, dy and out in a panel: their own, or that of the arithmetic */
    int64_t panel_size;
    int64_t rows, cols;
    int64_t chunk; /* columns of a panel */
    int64_t pitch; /* elements between rows of a buffered panel */
    int64_t group; /* rows of a panel */
    int64_t part_rows, parts;
    int want_params, add_to_out, stream_out;
    char *partial; /* [parts][2][cols] of float or double */
} nji_host_job;

/* One thread's buffers and the panel they serve. */
typedef struct nji_host_work {
    nji_host_panel panel;
    int64_t offset[NJI_HOST_ROWS]; /* of the rows of the operand in hand; elements */
    int64_t row;                   /* first row of the panel */
    int rows;
    int64_t param_col; /* columns of gamma and beta that are loaded; -1: none */
    NJI_CACHE_ALIGNED
    double x[NJI_HOST_BUFFER_BYTES / 8], other[NJI_HOST_BUFFER_BYTES / 8]; /* other: dy, then out */
    double gamma[NJI_HOST_CHUNK_BYTES / 8], beta[NJI_HOST_CHUNK_BYTES / 8];
} nji_host_work;

static const int64_t nji_host_count[NJI_HOST_ROWS] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10,
                                                      11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                                      22, 23, 24, 25, 26, 27, 28, 29, 30, 31};

/* Offsets of `count` rows from `row` on. */
static void nji_host_row_offsets(const nji_problem *problem, const long long *stride, int64_t row,
                                 int count, int64_t *offset) {
    int64_t index[NJI_DIMS], at = 0;
    int d, r;
    if (problem->row_dims <= 1) {
        int64_t step = problem->row_dims ? stride[0] : 0;
        for (r = 0; r < count; r++)
            offset[r] = (row + r) * step;
        return;
    }
    for (d = problem->row_dims - 1; d >= 0; d--) {
        index[d] = row % problem->extent[d];
        row /= problem->extent[d];
        at += index[d] * stride[d];
    }
    for (r = 0; r < count; r++) {
        offset[r] = at;
        for (d = problem->row_dims - 1; d >= 0; d--) { /* count up, with carry */
            at += stride[d];
            if (++index[d] < problem->extent[d]) break;
            at -= index[d] * stride[d];
            index[d] = 0;
        }
    }
}

/* The columns from `col` on, at most `count`, that are evenly spaced: how many, where the first
   lies and how far apart they are (elements). */
static int64_t nji_host_col_run(const nji_problem *problem, const long long *stride, int64_t col,
                                int64_t count, int64_t *offset, int64_t *step) {
    const long long *extent = problem->extent + problem->row_dims;
    int last = problem->col_dims - 1, d;
    int64_t within;
    *offset = 0;
    *step = last < 0 ? 0 : stride[last];
    if (last <= 0) {
        *offset = col * *step;
        return count;
    }
    within = col % extent[last];
    for (d = last; d >= 0; d--) {
        *offset += col % extent[d] * stride[d];
        col /= extent[d];
    }
    return nji_min_i64(count, extent[last] - within);
}

/* Copies a panel of the operand into `buffer`, as float or double. offset: its rows (elements). */
static void nji_host_load(const nji_host_job *job, const nji_host_view *view, const int64_t *offset,
                          int rows, int64_t col, int64_t count, void *buffer) {
    nji_host_copy copy = view->type->load[job->wide];
    nji_host_row_copy fast = job->wide ? NULL : job->isa->load[view->dtype];
    int64_t row_at[NJI_HOST_ROWS], done, run, from, step;
    int r;
    for (r = 0; r < rows; r++)
        row_at[r] = r * job->pitch;
    for (done = 0; done < count; done += run) {
        char *to = (char *)buffer + done * job->real_size;
        const char *base;
        run = nji_host_col_run(job->problem, view->col_stride, col + done, count - done, &from,
                               &step);
        base = view->data + from * view->type->size;
        if (!fast || step != 1) {
            copy(base, offset, step, to, row_at, 1, rows, run, view->along_rows);
            continue;
        }
        for (r = 0; r < rows; r++)
            fast(base + offset[r] * view->type->size, to + row_at[r] * job->real_size, run);
    }
}

/* The way back. */
static void nji_host_store(const nji_host_job *job, const nji_host_view *view,
                           const int64_t *offset, int rows, int64_t col, int64_t count,
                           const void *buffer) {
    nji_host_copy copy = view->type->store[job->wide];
    nji_host_row_copy fast = job->wide ? NULL : job->isa->store[view->dtype];
    int64_t row_at[NJI_HOST_ROWS], done, run, to, step;
    int r;
    for (r = 0; r < rows; r++)
        row_at[r] = r * job->pitch;
    for (done = 0; done < count; done += run) {
        const char *from = (const char *)buffer + done * job->real_size;
        char *base;
        run =
            nji_host_col_run(job->problem, view->col_stride, col + done, count - done, &to, &step);
        base = view->data + to * view->type->size;
        if (!fast || step != 1) {
            copy(from, row_at, 1, base, offset, step, rows, run, view->along_rows);
            continue;
        }
        for (r = 0; r < rows; r++)
            fast(from + row_at[r] * job->real_size, base + offset[r] * view->type->size, run);
    }
}

/* Points the panel's rows in hand at an input: in place, or at a copy in `buffer`. */
static void nji_host_fetch(const nji_host_job *job, nji_host_work *work, const nji_host_view *view,
                           int64_t col, int64_t count, void *buffer, const void **row) {
    int begin = work->panel.begin, end = work->panel.end, r;
    int64_t *offset = work->offset;
    nji_host_row_offsets(job->problem, view->row_stride, work->row + begin, end - begin, offset);
    if (!view->direct) nji_host_load(job, view, offset, end - begin, col, count, buffer);
    for (r = begin; r < end; r++)
        row[r] = view->direct ? view->data + (offset[r - begin] + col) * job->panel_size
                              : (char *)buffer + (r - begin) * job->pitch * job->panel_size;
}

/* A chunk of gamma or beta: in place, or in `buffer`, which holds 1 or 0 for an absent one. */
static const void *nji_host_fetch_param(const nji_host_job *job, const nji_host_view *view,
                                        int64_t col, int64_t count, void *buffer) {
    int64_t zero = 0;
    if (view->direct) return view->data + col * job->real_size;
    if (view->data) nji_host_load(job, view, &zero, 1, col, count, buffer);
    return buffer;
}

static void nji_host_fetch_params(const nji_host_job *job, nji_host_work *work, int64_t col,
                                  int64_t count) {
    if (work->param_col == col) return;
    work->panel.gamma = nji_host_fetch_param(job, &job->gamma, col, count, work->gamma);
    work->panel.beta = nji_host_fetch_param(job, &job->beta, col, count, work->beta);
    work->param_col = col;
}

/* Readies a thread's buffers: no columns of gamma and beta loaded; 1 and 0 if they are absent. */
static void nji_host_begin_work(const nji_host_job *job, nji_host_work *work) {
    int64_t count = nji_min_i64(job->chunk, job->cols), c;
    work->param_col = -1;
    for (c = 0; c < count; c++) {
        if (job->wide) {
            work->gamma[c] = 1;
            work->beta[c] = 0;
        } else {
            ((float *)work->gamma)[c] = 1;
            ((float *)work->beta)[c] = 0;
        }
    }
}

/* Whether the panel holds whole rows: then they are fetched once. */
static int nji_host_one_chunk(const nji_host_job *job) {
    return job->cols <= job->chunk;
}

/* Bytes from a row of x in this panel to the same row of the next, when that is worth fetching
   early: short rows leave memory idle in their last sweep, and their next panel is near. */
static int64_t nji_host_ahead(const nji_host_job *job, const nji_host_work *work) {
    if (!job->x.direct || job->problem->row_dims != 1 || !nji_host_one_chunk(job)) return 0;
    if (work->row + 2 * job->group > job->rows) return 0;
    return job->group * job->x.row_stride[0] * job->panel_size;
}

/* Points the panel's rows at the output, or at a buffer that nji_host_end_out will write from. */
static void nji_host_begin_out(const nji_host_job *job, nji_host_work *work, int64_t col) {
    int in_place = job->out.direct && !job->add_to_out && !job->stream_out, r;
    nji_host_row_offsets(job->problem, job->out.row_stride, work->row, work->rows, work->offset);
    for (r = 0; r < work->rows; r++)
        work->panel.out[r] = in_place ? job->out.data + (work->offset[r] + col) * job->panel_size
                                      : (char *)work->other + r * job->pitch * job->panel_size;
}

static void nji_host_end_out(const nji_host_job *job, nji_host_work *work, int64_t col,
                             int64_t count) {
    int r;
    if (job->stream_out) {
        for (r = 0; r < work->rows; r++)
            job->isa->stream(work->panel.out[r],
                             job->out.data + (work->offset[r] + col) * job->panel_size,
                             count * job->panel_size);
        return;
    }
    if (job->add_to_out) {
        for (r = 0; r < work->rows; r++) { /* x's buffer is free by now */
            nji_host_load(job, &job->out, work->offset + r, 1, col, count, work->x);
            job->isa->add[job->wide](work->panel.out[r], work->x, count);
        }
    }
    if (!job->out.direct || job->add_to_out)
        nji_host_store(job, &job->out, work->offset, work->rows, col, count, work->other);
}

/* ---- one part of the rows ------------------------------------------------------------------- */

static void nji_host_read_stats(const nji_host_job *job, nji_host_work *work,
                                const nji_operand *stat, double *value) {
    if (!stat->data) { /* dbeta alone: no statistic is given, none matters */
        memset(value, 0, (size_t)work->rows * sizeof *value);
        return;
    }
    nji_host_row_offsets(job->problem, stat->stride, work->row, work->rows, work->offset);
    nji_host_types[job->stat_dtype].load[1](stat->data, work->offset, 0, value, nji_host_count, 0,
                                            work->rows, 1, 1);
}

static void nji_host_write_stats(const nji_host_job *job, nji_host_work *work,
                                 const nji_operand *stat, const double *value) {
    if (!stat->data) return;
    nji_host_row_offsets(job->problem, stat->stride, work->row, work->rows, work->offset);
    nji_host_types[job->stat_dtype].store[1](value, nji_host_count, 0, stat->data, work->offset, 0,
                                             work->rows, 1, 1);
}

/* The value rounded to the type of the arithmetic. */
static double nji_host_round(const nji_host_job *job, double value) {
    return job->wide ? value : (double)(float)value;
}

/* Takes `step` over the panel, chunk by chunk. Row by row where memory is read in place: that keeps
   to few streams, which processors fetch ahead by themselves. `fetched`: by an earlier sweep. */
static void nji_host_sweep(const nji_host_job *job, nji_host_work *work,
                           void (*step)(nji_host_panel *, int64_t), int want_dy, int fetched) {
    nji_host_panel *panel = &work->panel;
    int rows = nji_host_one_chunk(job) || !job->x.direct ? work->rows : 1;
    int in_place = job->x.direct && (!want_dy || (job->dy.direct && job->gamma.direct));
    int64_t most = in_place ? NJI_HOST_SWEEP_COLS : job->chunk, col, count;
    for (panel->begin = 0; panel->begin < work->rows; panel->begin += rows) {
        panel->end = panel->begin + rows;
        for (col = 0; col < job->cols; col += count) {
            count = nji_min_i64(most, job->cols - col);
            if (!fetched || !nji_host_one_chunk(job)) {
                nji_host_fetch(job, work, &job->x, col, count, work->x, panel->x);
                if (want_dy)
                    nji_host_fetch(job, work, &job->dy, col, count, work->other, panel->dy);
            }
            if (want_dy) nji_host_fetch_params(job, work, col, count);
            step(panel, count);
        }
    }
    panel->begin = 0;
    panel->end = work->rows;
}

/* Mean and rstd of the panel's rows, by two sweeps: the second measures from the first's mean,
   which corrects that mean and cancels nothing however large |mean| is against the deviation. */
static void nji_host_row_stats(const nji_host_job *job, nji_host_work *work) {
    nji_host_panel *panel = &work->panel;
    double mean[NJI_HOST_ROWS], n = (double)job->cols;
    int r;
    for (r = 0; r < work->rows; r++)
        panel->sum[r] = 0;
    nji_host_sweep(job, work, job->math->sum, 0, 0);
    for (r = 0; r < work->rows; r++) {
        panel->center[r] = nji_host_round(job, panel->sum[r] / n);
        panel->sum[r] = panel->square[r] = 0;
    }
    nji_host_sweep(job, work, job->math->moments, 0, 1);
    for (r = 0; r < work->rows; r++) {
        /* a mean that is no number cannot be corrected, and its deviations are none either */
        int finite = panel->center[r] - panel->center[r] == 0;
        double off = finite ? panel->sum[r] / n : 0; /* true mean less center */
        double variance = panel->square[r] / n - off * off;
        if (variance < 0) variance = 0; /* NaN stays */
        mean[r] = nji_host_round(job, panel->center[r] + off);
        panel->rstd[r] = nji_host_round(job, 1 / sqrt(variance + job->problem->eps));
        panel->shift[r] = -off * panel->rstd[r];
    }
    nji_host_write_stats(job, work, &job->problem->mean, mean);
    nji_host_write_stats(job, work, &job->problem->rstd, panel->rstd);
}

static void nji_host_forward_panel(const nji_host_job *job, nji_host_work *work) {
    nji_host_panel *panel = &work->panel;
    int64_t col, count;
    nji_host_row_stats(job, work);
    panel->ahead = nji_host_ahead(job, work);
    for (col = 0; col < job->cols; col += count) {
        count = nji_min_i64(job->chunk, job->cols - col);
        if (!nji_host_one_chunk(job))
            nji_host_fetch(job, work, &job->x, col, count, work->x, panel->x);
        nji_host_fetch_params(job, work, col, count);
        nji_host_begin_out(job, work, col);
        job->math->forward(panel, count);
        nji_host_end_out(job, work, col, count);
    }
}

/* The two means over the columns that dx needs. */
static void nji_host_row_means(const nji_host_job *job, nji_host_work *work) {
    nji_host_panel *panel = &work->panel;
    double n = (double)job->cols;
    int r;
    for (r = 0; r < work->rows; r++)
        panel->sum[r] = panel->square[r] = 0;
    nji_host_sweep(job, work, job->math->backward_sums, 1, 0);
    for (r = 0; r < work->rows; r++) {
        panel->mean_g[r] = panel->sum[r] / n;
        panel->mean_gx[r] = panel->square[r] / n;
        /* one column: dx is 0, and not the rounding error that a fused multiply-add leaves */
        panel->scale[r] = job->cols == 1 ? 0 : panel->rstd[r];
    }
}

static void nji_host_backward_panel(const nji_host_job *job, nji_host_work *work, char *dgamma,
                                    char *dbeta) {
    nji_host_panel *panel = &work->panel;
    int want_dx = job->out.data != NULL;
    int64_t col, count;
    nji_host_read_stats(job, work, &job->problem->mean, panel->center);
    nji_host_read_stats(job, work, &job->problem->rstd, panel->rstd);
    if (want_dx) nji_host_row_means(job, work);
    for (col = 0; col < job->cols; col += count) {
        count = nji_min_i64(job->chunk, job->cols - col);
        if (!want_dx || !nji_host_one_chunk(job)) {
            nji_host_fetch(job, work, &job->x, col, count, work->x, panel->x);
            nji_host_fetch(job, work, &job->dy, col, count, work->other, panel->dy);
        }
        nji_host_fetch_params(job, work, col, count);
        if (job->want_params) {
            panel->dgamma = dgamma + col * job->real_size;
            panel->dbeta = dbeta + col * job->real_size;
        }
        if (!want_dx) {
            job->math->params(panel, count);
            continue;
        }
        nji_host_begin_out(job, work, col);
        (job->want_params ? job->math->dx_params : job->math->dx)(panel, count);
        nji_host_end_out(job, work, col, count);
    }
}

static void nji_host_forward_part(const nji_host_job *job, int64_t part) {
    nji_host_work work;
    int64_t row = part * job->part_rows, end = nji_min_i64(row + job->part_rows, job->rows);
    nji_host_begin_work(job, &work);
    for (; row < end; row += job->group) {
        work.row = row;
        work.rows = work.panel.end = (int)nji_min_i64(job->group, end - row);
        work.panel.begin = 0;
        nji_host_forward_panel(job, &work);
    }
    if (job->stream_out) nji_host_fence();
}

static void nji_host_backward_part(const nji_host_job *job, int64_t part) {
    nji_host_work work;
    int64_t row = part * job->part_rows, end = nji_min_i64(row + job->part_rows, job->rows);
    int64_t bytes = job->cols * job->real_size;
    char *dgamma = job->want_params ? job->partial + part * 2 * bytes : NULL;
    if (bytes > 0 && job->want_params) memset(dgamma, 0, (size_t)(2 * bytes));
    nji_host_begin_work(job, &work);
    for (; row < end; row += job->group) {
        work.row = row;
        work.rows = work.panel.end = (int)nji_min_i64(job->group, end - row);
        work.panel.begin = 0;
        nji_host_backward_panel(job, &work, dgamma, job->want_params ? dgamma + bytes : NULL);
    }
    if (job->stream_out) nji_host_fence();
}

/* ---- parameter gradients -------------------------------------------------------------------- */

/* Adds the parts' sums of some columns in order and in double, then rounds once. */
static void nji_host_finish_param(const nji_host_job *job, const nji_host_view *view, int which,
                                  int64_t col, int64_t count) {
    double sum[NJI_HOST_FINISH_COLS], old[NJI_HOST_FINISH_COLS];
    int adds = (job->problem->accumulate & (which ? NJ_GRAD_DBETA : NJ_GRAD_DGAMMA)) != 0;
    int64_t zero = 0, part, done, run, at, step, c;
    if (!view->data || (adds && job->parts == 0)) return;
    for (c = 0; c < count; c++)
        sum[c] = 0;
    for (part = 0; part < job->parts; part++)
        job->isa->add_wide[job->wide](
            sum, job->partial + ((part * 2 + which) * job->cols + col) * job->real_size, count);
    for (done = 0; done < count; done += run) {
        char *base;
        run =
            nji_host_col_run(job->problem, view->col_stride, col + done, count - done, &at, &step);
        base = view->data + at * view->type->size;
        if (adds) {
            view->type->load[1](base, &zero, step, old, &zero, 1, 1, run, 0);
            for (c = 0; c < run; c++)
                sum[done + c] += old[c];
        }
        view->type->store[1](sum + done, &zero, 1, base, &zero, step, 1, run, 0);
    }
}

static void nji_host_finish_cols(const nji_host_job *job, int64_t block) {
    int64_t col = block * NJI_HOST_FINISH_COLS;
    int64_t count = nji_min_i64(NJI_HOST_FINISH_COLS, job->cols - col);
    nji_host_finish_param(job, &job->dgamma, 0, col, count);
    nji_host_finish_param(job, &job->dbeta, 1, col, count);
}

/* ---- the two entries ------------------------------------------------------------------------ */

/* How the rows are split for the parameter gradients. From the sizes alone: the split is part of
   the result's bits. Workspace: at most 64 parts or 1 MiB, whichever is more, of 2*cols sums. */
static void nji_host_split(int64_t rows, int64_t cols, int64_t real_size, int64_t *part_rows,
                           int64_t *parts) {
    int64_t most = NJI_HOST_PARTIAL_BYTES / 2 / real_size / (cols > 0 ? cols : 1);
    *parts = rows / NJI_HOST_PART_ROWS;
    if (*parts < NJI_HOST_LEAST_PARTS) *parts = NJI_HOST_LEAST_PARTS;
    if (most < NJI_HOST_PARTS) most = NJI_HOST_PARTS;
    *parts = nji_min_i64(nji_min_i64(*parts, rows), most);
    *part_rows = *parts ? rows / *parts + (rows % *parts != 0) : 1;
    *parts = rows / *part_rows + (rows % *part_rows != 0);
}

static int64_t nji_host_real_size(const nj_desc *desc) {
    return desc->dtype == NJ_F64 ? (int64_t)sizeof(double) : (int64_t)sizeof(float);
}

/* Bytes of workspace that nji_host_run needs; -1 when they overflow. From sizes alone. */
static int64_t nji_host_workspace(const nj_desc *desc, int64_t rows, int64_t cols) {
    int64_t part_rows, parts, bytes;
    if (desc->op != NJ_OP_LAYER_NORM_BACKWARD || !(desc->grads & (NJ_GRAD_DGAMMA | NJ_GRAD_DBETA)))
        return 0;
    nji_host_split(rows, cols, nji_host_real_size(desc), &part_rows, &parts);
    if (!nji_mul_i64(parts, 2 * nji_host_real_size(desc), &bytes) ||
        !nji_mul_i64(bytes, cols, &bytes))
        return -1;
    return bytes;
}

static int64_t nji_host_distance(int64_t stride) {
    return stride < 0 ? -stride : stride;
}

static nji_host_view nji_host_make_view(const nji_host_job *job, const nji_operand *operand,
                                        int dtype, int is_wanted) {
    const nji_problem *problem = job->problem;
    int row_dims = problem->row_dims, col_dims = problem->col_dims;
    nji_host_view view;
    view.data = is_wanted ? (char *)operand->data : NULL;
    view.row_stride = operand->stride;
    view.col_stride = operand->stride + row_dims;
    view.dtype = dtype;
    view.type = &nji_host_types[dtype];
    view.packed_cols = col_dims == 0 || (col_dims == 1 && view.col_stride[0] == 1);
    view.direct = 0; /* see nji_host_choose_panel */
    view.along_rows = view.data && row_dims && col_dims &&
                      nji_host_distance(view.row_stride[row_dims - 1]) <
                          nji_host_distance(view.col_stride[col_dims - 1]);
    return view;
}

/* Chooses the type of a panel's elements: their own when all lie in packed columns and there is
   arithmetic that takes it, else that of the arithmetic, into which they are copied. */
static void nji_host_choose_panel(nji_host_job *job) {
    int real = job->wide ? NJ_F64 : NJ_F32, own = job->x.dtype;
    int is_packed = job->x.packed_cols && (!job->dy.data || job->dy.packed_cols) &&
                    (!job->out.data || job->out.packed_cols);
    if (!job->isa->math[own].sum || !is_packed || job->add_to_out) own = real;
    job->panel_dtype = own;
    job->panel_size = nji_host_types[own].size;
    job->math = &job->isa->math[own];
    job->x.direct = job->x.packed_cols && job->x.dtype == own;
    job->dy.direct = job->dy.packed_cols && job->dy.dtype == own;
    job->out.direct = job->out.packed_cols && job->out.dtype == own;
    job->gamma.direct = job->gamma.data && job->gamma.packed_cols && job->gamma.dtype == real;
    job->beta.direct = job->beta.data && job->beta.packed_cols && job->beta.dtype == real;
}

/* Chooses the shape of panels and parts. */
static void nji_host_shape_job(nji_host_job *job) {
    int64_t width, panel, in_cache;
    int along_rows = job->x.along_rows || job->dy.along_rows || job->out.along_rows;
    /* where rows lie together, panels are tall: then memory is walked by whole cache lines */
    job->chunk = NJI_HOST_CHUNK_BYTES / job->real_size / (along_rows ? 4 : 1);
    width = nji_min_i64(job->chunk, job->cols > 0 ? job->cols : 1);
    job->pitch = width + NJI_HOST_PAD_BYTES / job->panel_size;
    panel = !along_rows && width * job->panel_size <= NJI_HOST_SHORT_ROW ? NJI_HOST_SHORT_PANEL
                                                                         : NJI_HOST_PANEL_BYTES;
    job->group = nji_min_i64(panel / job->panel_size / width, NJI_HOST_ROWS);
    in_cache = NJI_HOST_GROUP_BYTES / job->panel_size / (job->cols > 0 ? job->cols : 1);
    if (!along_rows && job->group > in_cache) job->group = in_cache > 0 ? in_cache : 1;
    if (job->want_params) {
        nji_host_split(job->rows, job->cols, job->real_size, &job->part_rows, &job->parts);
    } else {
        job->part_rows = (NJI_HOST_PARALLEL_FROM / width / job->group + 1) * job->group;
        job->parts = job->rows / job->part_rows + (job->rows % job->part_rows != 0);
    }
    job->stream_out = job->isa->stream && job->out.data && job->out.direct && !job->add_to_out &&
                      job->rows * job->cols * job->panel_size >= NJI_HOST_STREAM_FROM;
    if (job->out.data == job->x.data || job->out.data == job->dy.data) job->stream_out = 0;
}

static void nji_host_for_each(void (*task)(const nji_host_job *, int64_t), const nji_host_job *job,
                              int64_t count) {
    int64_t i;
#ifdef _OPENMP
    if (count > 1 && job->rows * job->cols >= NJI_HOST_PARALLEL_FROM) {
#pragma omp parallel for schedule(dynamic)
        for (i = 0; i < count; i++)
            task(job, i);
        return;
    }
#endif
    for (i = 0; i < count; i++)
        task(job, i);
}

/* Computes the problem; all is validated and desc has no defaults left. Needs no memory but the
   workspace (16-byte aligned) and some 64 KB of stack per thread. */
static void nji_host_run(const nj_desc *desc, const nji_problem *problem, void *workspace) {
    nji_host_job job;
    int is_forward = desc->op == NJ_OP_LAYER_NORM_FORWARD;
    unsigned grads = is_forward ? 0 : problem->grads;
    job.problem = problem;
    job.isa = nji_host_pick_isa();
    job.wide = desc->dtype == NJ_F64;
    job.real_size = nji_host_real_size(desc);
    job.rows = problem->rows;
    job.cols = problem->cols;
    job.stat_dtype = (int)desc->stat_dtype;
    job.partial = (char *)workspace;
    job.want_params = (grads & (NJ_GRAD_DGAMMA | NJ_GRAD_DBETA)) != 0;
    job.add_to_out = (grads & problem->accumulate & NJ_GRAD_DX) != 0;
    /* dbeta alone comes without x: dy stands in for it, and what is made of it goes nowhere */
    job.x =
        nji_host_make_view(&job, problem->x.data ? &problem->x : &problem->dy, (int)desc->dtype, 1);
    job.dy = nji_host_make_view(&job, &problem->dy, (int)desc->dtype, !is_forward);
    job.gamma = nji_host_make_view(&job, &problem->gamma, (int)desc->param_dtype, 1);
    job.beta = nji_host_make_view(&job, &problem->beta, (int)desc->param_dtype, is_forward);
    job.dgamma = nji_host_make_view(&job, &problem->dgamma, (int)desc->param_dtype,
                                    (grads & NJ_GRAD_DGAMMA) != 0);
    job.dbeta = nji_host_make_view(&job, &problem->dbeta, (int)desc->param_dtype,
                                   (grads & NJ_GRAD_DBETA) != 0);
    job.out = is_forward ? nji_host_make_view(&job, &problem->y, (int)desc->dtype, 1)
                         : nji_host_make_view(&job, &problem->dx, (int)desc->dtype,
                                              (grads & NJ_GRAD_DX) != 0);
    nji_host_choose_panel(&job);
    nji_host_shape_job(&job);
    nji_host_for_each(is_forward ? nji_host_forward_part : nji_host_backward_part, &job, job.parts);
    if (job.want_params)
        nji_host_for_each(nji_host_finish_cols, &job, nji_ceil_div(job.cols, NJI_HOST_FINISH_COLS));
}

/* One line for nj_ctx_info. */
static void nji_host_describe(char *text, size_t size) {
#ifdef _OPENMP
    const char *threads = "OpenMP";
#else
    const char *threads = "one thread";
#endif
    snprintf(text, size, "host: %s, %s", nji_host_pick_isa()->name, threads);
}

/* The fields that the backend knows. */
static void nji_host_sku(const nj_desc *desc, nj_sku *out) {
    const nji_host_isa *isa = nji_host_pick_isa();
    out->source = NJ_SOURCE_HOST;
    out->vector_bytes = isa->vector_bytes;
    snprintf(out->kernel, sizeof out->kernel, "nji_host_%s",
             desc->op == NJ_OP_LAYER_NORM_FORWARD ? "forward" : "backward");
}
