/* The host backend.

   Rows are taken in panels, up to NJI_HOST_ROWS at a time. Operands in packed columns are read and
   written where they lie, a whole row after the other, while the next is fetched. Others are
   converted and gathered, a chunk of columns at a time, into a panel that stays in the nearest
   cache. So the arithmetic below knows one layout, and strides are dealt with in one place.

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

#define NJI_HOST_LINE 64           /* bytes of a cache line */
#define NJI_HOST_ROWS 32           /* rows of a panel, at most */
#define NJI_HOST_CHUNK_BYTES 4096  /* of a chunk of gamma: columns of a panel, at most */
#define NJI_HOST_PANEL_BYTES 24576 /* of a panel, without the padding of its rows */
#define NJI_HOST_PAD_BYTES 64      /* keeps panel rows out of each other's cache sets */
#define NJI_HOST_BUFFER_BYTES (NJI_HOST_PANEL_BYTES + NJI_HOST_ROWS * NJI_HOST_PAD_BYTES)
#define NJI_HOST_ROOM_BYTES 98304 /* of a thread: two rows of 12288 floats, or what panels need */
#define NJI_HOST_SWEEP_COLS 8192  /* columns of one sum of float or double, where in place */
#define NJI_HOST_SUM_ROWS 256     /* rows of one such sum, about */

/* Tuned on memory-bound sizes; only speed depends on them. */
#define NJI_HOST_LONG_ROW 8192        /* bytes of a row that is long; see nji_host_is_long */
#define NJI_HOST_AHEAD_BYTES 8192     /* between what is written and the later row fetched then */
#define NJI_HOST_AHEAD_IN_ROW 4096    /* between what is read and fetched in a long row */
#define NJI_HOST_SHORT_ROW 1024       /* bytes of a row; forward: up to there ... */
#define NJI_HOST_BATCH_BYTES 4096     /* ... so much is swept before it is swept again */
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
            for (c = 0; c < cols; c++) b[c * to_col] = (target)convert(a[c * from_col]);           \
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
    const char *x, *dy;                /* the first row's chunk */
    char *out;                         /* y or dx; may be x or dy */
    int64_t x_step, dy_step, out_step; /* bytes from row to row */
    int64_t ahead;                     /* bytes to what is fetched while a row is first read */
    int64_t x_ahead, dy_ahead;         /* ... while it is written: hints, which may lead nowhere */
    const void *gamma, *beta;          /* the chunk of each; never null */
    void *dgamma, *dbeta;              /* partial sums of the chunk, added to */
    int64_t first;  /* columns of the chunk that come before those in hand; for sums only */
    int begin, end; /* the rows in hand */
    int stream;     /* out is written past the caches; see NJI_PUT */
    /* By row. The sums grow from chunk to chunk; in double, so chunks add no error of their own. */
    double sum[NJI_HOST_ROWS], square[NJI_HOST_ROWS];
    double mean[NJI_HOST_ROWS];
    double center[NJI_HOST_ROWS]; /* of type real: the mean, or close to it */
    double shift[NJI_HOST_ROWS];  /* xhat = (x - center) * rstd + shift */
    double rstd[NJI_HOST_ROWS];
    double scale[NJI_HOST_ROWS]; /* dx = scale * (g - mean_g - xhat * mean_gx) */
    double mean_g[NJI_HOST_ROWS], mean_gx[NJI_HOST_ROWS];
} nji_host_panel;

/* One set for each element type and instruction set. `cols`: those in hand. */
typedef struct nji_host_math {
    void (*sum)(nji_host_panel *panel, int64_t cols);             /* sum += x */
    void (*moments)(nji_host_panel *panel, int64_t cols);         /* sum, square of x-center */
    void (*forward)(const nji_host_panel *panel, int64_t cols);   /* out = y */
    void (*backward_sums)(nji_host_panel *panel, int64_t cols);   /* sum += g, square += g*xhat */
    void (*dx)(const nji_host_panel *panel, int64_t cols);        /* out = dx */
    void (*params)(const nji_host_panel *panel, int64_t cols);    /* dgamma, dbeta */
    void (*dx_params)(const nji_host_panel *panel, int64_t cols); /* both, reading once */
    /* backward_sums and dx or dx_params row by row, so that a processor fetches the next row while
       it writes one; cols: all, up to NJI_HOST_SWEEP_COLS */
    void (*whole_dx)(const nji_host_panel *panel, int64_t cols);
    void (*whole_dx_params)(const nji_host_panel *panel, int64_t cols);
} nji_host_math;

#if NJI_HOST_VECTORS
/* Vectors as they lie in memory: aligned as their elements, and free to alias them. */
#define NJI_VECTOR(name, element, bytes)                                                           \
    typedef element name __attribute__((vector_size(bytes), aligned(sizeof(element)), may_alias))
NJI_VECTOR(nji_float_base, float, 16);
NJI_VECTOR(nji_float_half, float, 8);
NJI_VECTOR(nji_double_base, double, 16);
#define NJI_WIDER(value, vec) __builtin_convertvector(value, vec)
#define NJI_BASE_LANES_float 4
#define NJI_BASE_LANES_double 2
#define NJI_LANES_float(v) (((v)[0] + (v)[2]) + ((v)[1] + (v)[3]))
#define NJI_LANES_double(v) ((v)[0] + (v)[1])
#if NJI_HOST_X86
NJI_VECTOR(nji_u32_base, uint32_t, 16);
NJI_VECTOR(nji_float_avx2, float, 32);
NJI_VECTOR(nji_double_avx2, double, 32);
NJI_VECTOR(nji_u32_avx2, uint32_t, 32);
NJI_VECTOR(nji_float_avx512, float, 64);
NJI_VECTOR(nji_double_avx512, double, 64);
NJI_VECTOR(nji_u32_avx512, uint32_t, 64);
#endif
#else
typedef float nji_float_base, nji_float_half;
typedef double nji_double_base;
#define NJI_WIDER(value, vec) ((vec)(value))
#define NJI_BASE_LANES_float 1
#define NJI_BASE_LANES_double 1
#define NJI_LANES_float(v) (v)
#define NJI_LANES_double(v) (v)
#endif

/* Fetches what lies `ahead` bytes on, by cache lines. */
#define NJI_PREFETCH_LINES(p, ahead, count)                                                        \
    do {                                                                                           \
        size_t line;                                                                               \
        for (line = 0; line < (count) * sizeof *(p); line += NJI_HOST_LINE)                        \
            NJI_PREFETCH((const char *)(p) + (ahead) + line);                                      \
    } while (0)

/* Row r of the panel's x, dy or out. */
#define NJI_ROW_OF(panel, what, r, type) ((type *)((panel)->what + (r) * (panel)->what##_step))

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
#define NJI_PUT1_f16(p, value, stream) (*(p) = nji_f16_from_f32(value))
#define NJI_PUT1_bf16(p, value, stream) (*(p) = nji_bf16_from_f32(value))
#define NJI_PUT1_f32(p, value, stream) (*(p) = (value))
#define NJI_PUT1_f64(p, value, stream) (*(p) = (value))

#define NJI_GET_f32_base(p) NJI_READ(nji_float_base, p)
#define NJI_GET_f64_base(p) NJI_READ(nji_double_base, p)
#define NJI_PUT_f32_base(p, value, stream) (NJI_AT(nji_float_base, p) = (value))
#define NJI_PUT_f64_base(p, value, stream) (NJI_AT(nji_double_base, p) = (value))

#if NJI_HOST_X86
/* Writes a vector, past the caches if asked: whole cache lines then need not be read before they
   are written. By 16 bytes, since the output may be aligned no better; the processor joins them. */
#define NJI_PUT(vec, pieces, p, value, stream)                                                     \
    do {                                                                                           \
        vec packed = (vec)(value);                                                                 \
        if (stream) NJI_STREAM_##pieces((__m128i *)(p), (const nji_u32_base *)&packed);            \
        else NJI_AT(vec, p) = packed;                                                              \
    } while (0)
#define NJI_STREAM_1(to, piece) _mm_stream_si128(to, (__m128i)(piece)[0])
#define NJI_STREAM_2(to, piece) (NJI_STREAM_1(to, piece), NJI_STREAM_1((to) + 1, (piece) + 1))
#define NJI_STREAM_4(to, piece) (NJI_STREAM_2(to, piece), NJI_STREAM_2((to) + 2, (piece) + 2))

#define NJI_GET_f32_avx2(p) NJI_READ(nji_float_avx2, p)
#define NJI_GET_f64_avx2(p) NJI_READ(nji_double_avx2, p)
#define NJI_PUT_f32_avx2(p, value, stream) NJI_PUT(nji_float_avx2, 2, p, value, stream)
#define NJI_PUT_f64_avx2(p, value, stream) NJI_PUT(nji_double_avx2, 2, p, value, stream)
#define NJI_GET_f32_avx512(p) NJI_READ(nji_float_avx512, p)
#define NJI_GET_f64_avx512(p) NJI_READ(nji_double_avx512, p)
#define NJI_PUT_f32_avx512(p, value, stream) NJI_PUT(nji_float_avx512, 4, p, value, stream)
#define NJI_PUT_f64_avx512(p, value, stream) NJI_PUT(nji_double_avx512, 4, p, value, stream)

/* The masked forms, since g++ 12 takes the plain ones' own "undefined" operand for our mistake. */
#define NJI_GET_f16_avx2(p) ((nji_float_avx2)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p))))
#define NJI_GET_f16_avx512(p)                                                                      \
    ((nji_float_avx512)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i *)(p))))
#define NJI_PUT_f16_avx2(p, value, stream)                                                         \
    NJI_PUT(nji_u32_base, 1, p, _mm256_cvtps_ph((__m256)(value), _MM_FROUND_TO_NEAREST_INT), stream)
#define NJI_PUT_f16_avx512(p, value, stream)                                                       \
    NJI_PUT(nji_u32_avx2, 2, p,                                                                    \
            _mm512_maskz_cvtps_ph(0xffff, (__m512)(value), _MM_FROUND_TO_NEAREST_INT), stream)

#define NJI_WIDEN_avx2(p)                                                                          \
    ((nji_u32_avx2)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define NJI_WIDEN_avx512(p)                                                                        \
    ((nji_u32_avx512)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256((const __m256i *)(p))))
/* Packing works by 128 bits: of four quarters, the first and the third are wanted. */
#define NJI_NARROW_avx2(p, bits, stream)                                                           \
    NJI_PUT(nji_u32_base, 1, p,                                                                    \
            _mm256_castsi256_si128(_mm256_permute4x64_epi64(                                       \
                _mm256_packus_epi32((__m256i)(bits), (__m256i)(bits)), 0xd8)),                     \
            stream)
#define NJI_NARROW_avx512(p, bits, stream)                                                         \
    NJI_PUT(nji_u32_avx2, 2, p, _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)(bits)), stream)

#define NJI_GET_bf16_avx2(p) ((nji_float_avx2)(NJI_WIDEN_avx2(p) << 16))
#define NJI_GET_bf16_avx512(p) ((nji_float_avx512)(NJI_WIDEN_avx512(p) << 16))
#define NJI_PUT_bf16_avx2(p, value, stream) NJI_PUT_BF16(avx2, p, value, stream)
#define NJI_PUT_bf16_avx512(p, value, stream) NJI_PUT_BF16(avx512, p, value, stream)

/* nji_bf16_from_f32 on every lane. (AVX512-BF16's own instruction takes subnormals for zero.) */
#define NJI_PUT_BF16(isa, p, value, stream)                                                        \
    do {                                                                                           \
        nji_float_##isa wide = (value);                                                            \
        nji_u32_##isa bits = (nji_u32_##isa)wide, near = bits + 0x7fffu + ((bits >> 16) & 1u);     \
        NJI_QUIET_NAN_##isa(near, bits, wide);                                                     \
        near >>= 16;                                                                               \
        NJI_NARROW_##isa(p, near, stream);                                                         \
    } while (0)
/* Lanes of `near` become `bits` and the quiet bit where `wide` is no number. */
#define NJI_QUIET_NAN_avx2(near, bits, wide)                                                       \
    near = (nji_u32_avx2)_mm256_blendv_ps((__m256)near, (__m256)(bits | 0x400000u),                \
                                          (__m256)(wide != wide))
#define NJI_QUIET_NAN_avx512(near, bits, wide)                                                     \
    near = (nji_u32_avx512)_mm512_mask_or_epi32(                                                   \
        (__m512i)near, _mm512_cmp_ps_mask((__m512)wide, (__m512)wide, _CMP_UNORD_Q),               \
        (__m512i)bits, _mm512_set1_epi32(0x400000))
#endif

/* A vector, or one column, of the backward pass of a row. */
#define NJI_HOST_STEP(vec, GET, PUT)                                                               \
    {                                                                                              \
        vec t = GET(dy + c), h = (GET(x + c) - center) * rstd;                                     \
        if (want_dx)                                                                               \
            PUT(out + c, ((t * NJI_READ(vec, gamma + c) - mean_g) - h * mean_gx) * scale,          \
                panel->stream);                                                                    \
        if (want_params) {                                                                         \
            NJI_AT(vec, dgamma + c) += t * h;                                                      \
            NJI_AT(vec, dbeta + c) += t;                                                           \
        }                                                                                          \
    }

/* C has no templates: this text is what adds up, for one type and one instruction set. */
#define NJI_HOST_ADDS(isa, TARGET, real, narrow, lanes, pieces)                                    \
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
        for (; c + lanes <= cols; c += lanes) NJI_AT(vec, a + c) += NJI_READ(vec, b + c);          \
        for (; c < cols; c++) a[c] += b[c];                                                        \
    }                                                                                              \
                                                                                                   \
    TARGET static void nji_host_add_wide_##real##_##isa(double *to, const void *from,              \
                                                        int64_t cols) {                            \
        typedef nji_double_##isa vec;                                                              \
        typedef nji_##real##_##narrow part;                                                        \
        const real *b = (const real *)from;                                                        \
        int64_t step = (int64_t)(sizeof(vec) / sizeof(double)), c;                                 \
        for (c = 0; c + step <= cols; c += step)                                                   \
            NJI_AT(vec, to + c) += NJI_WIDER(NJI_READ(part, b + c), vec);                          \
        for (; c < cols; c++) to[c] += (double)b[c];                                               \
    }

/* And this is the arithmetic, for rows of one element type. Columns go by four vectors or two, then
   by one, then one by one: where a column falls depends on its place alone. */
#define NJI_HOST_MATH(isa, TARGET, elem, real, lanes)                                              \
    TARGET static NJI_ALWAYS_INLINE double nji_host_row_sum_##elem##_##isa(                        \
        const nji_stored_##elem *x, int64_t cols, int64_t ahead) {                                 \
        typedef nji_##real##_##isa vec;                                                            \
        vec a = {0}, b = {0}, d = {0}, e = {0};                                                    \
        real rest = 0;                                                                             \
        int64_t c = 0;                                                                             \
        for (; c + 4 * lanes <= cols; c += 4 * lanes) {                                            \
            NJI_PREFETCH_LINES(x + c, ahead, 4 * lanes);                                           \
            a += NJI_GET_##elem##_##isa(x + c);                                                    \
            b += NJI_GET_##elem##_##isa(x + c + lanes);                                            \
            d += NJI_GET_##elem##_##isa(x + c + 2 * lanes);                                        \
            e += NJI_GET_##elem##_##isa(x + c + 3 * lanes);                                        \
        }                                                                                          \
        for (; c + lanes <= cols; c += lanes) a += NJI_GET_##elem##_##isa(x + c);                  \
        for (; c < cols; c++) rest += NJI_GET1_##elem(x + c);                                      \
        a = (a + b) + (d + e);                                                                     \
        return nji_host_lanes_##real##_##isa(&a) + (double)rest;                                   \
    }                                                                                              \
                                                                                                   \
    TARGET static NJI_ALWAYS_INLINE void nji_host_row_moments_##elem##_##isa(                      \
        const nji_stored_##elem *x, int64_t cols, real center, double *sum, double *square) {      \
        typedef nji_##real##_##isa vec;                                                            \
        vec a = {0}, b = {0}, a2 = {0}, b2 = {0};                                                  \
        real rest = 0, rest2 = 0;                                                                  \
        int64_t c = 0;                                                                             \
        for (; c + 2 * lanes <= cols; c += 2 * lanes) {                                            \
            vec d = NJI_GET_##elem##_##isa(x + c) - center,                                        \
                e = NJI_GET_##elem##_##isa(x + c + lanes) - center;                                \
            a += d;                                                                                \
            a2 += d * d;                                                                           \
            b += e;                                                                                \
            b2 += e * e;                                                                           \
        }                                                                                          \
        for (; c + lanes <= cols; c += lanes) {                                                    \
            vec d = NJI_GET_##elem##_##isa(x + c) - center;                                        \
            a += d;                                                                                \
            a2 += d * d;                                                                           \
        }                                                                                          \
        for (; c < cols; c++) {                                                                    \
            real d = NJI_GET1_##elem(x + c) - center;                                              \
            rest += d;                                                                             \
            rest2 += d * d;                                                                        \
        }                                                                                          \
        a += b;                                                                                    \
        a2 += b2;                                                                                  \
        *sum += nji_host_lanes_##real##_##isa(&a) + (double)rest;                                  \
        *square += nji_host_lanes_##real##_##isa(&a2) + (double)rest2;                             \
    }                                                                                              \
                                                                                                   \
    TARGET static NJI_ALWAYS_INLINE void nji_host_row_sums_##elem##_##isa(                         \
        const nji_stored_##elem *x, const nji_stored_##elem *dy, const real *gamma, int64_t cols,  \
        int64_t ahead, real center, real rstd, double *sum, double *square) {                      \
        typedef nji_##real##_##isa vec;                                                            \
        vec a = {0}, b = {0}, a2 = {0}, b2 = {0};                                                  \
        real rest = 0, rest2 = 0;                                                                  \
        int64_t c = 0;                                                                             \
        for (; c + 2 * lanes <= cols; c += 2 * lanes) {                                            \
            vec g = NJI_GET_##elem##_##isa(dy + c) * NJI_READ(vec, gamma + c);                     \
            vec f = NJI_GET_##elem##_##isa(dy + c + lanes) * NJI_READ(vec, gamma + c + lanes);     \
            NJI_PREFETCH_LINES(x + c, ahead, 2 * lanes);                                           \
            NJI_PREFETCH_LINES(dy + c, ahead, 2 * lanes);                                          \
            a += g;                                                                                \
            a2 += g * ((NJI_GET_##elem##_##isa(x + c) - center) * rstd);                           \
            b += f;                                                                                \
            b2 += f * ((NJI_GET_##elem##_##isa(x + c + lanes) - center) * rstd);                   \
        }                                                                                          \
        for (; c + lanes <= cols; c += lanes) {                                                    \
            vec g = NJI_GET_##elem##_##isa(dy + c) * NJI_READ(vec, gamma + c);                     \
            a += g;                                                                                \
            a2 += g * ((NJI_GET_##elem##_##isa(x + c) - center) * rstd);                           \
        }                                                                                          \
        for (; c < cols; c++) {                                                                    \
            real g = NJI_GET1_##elem(dy + c) * gamma[c];                                           \
            rest += g;                                                                             \
            rest2 += g * ((NJI_GET1_##elem(x + c) - center) * rstd);                               \
        }                                                                                          \
        a += b;                                                                                    \
        a2 += b2;                                                                                  \
        *sum += nji_host_lanes_##real##_##isa(&a) + (double)rest;                                  \
        *square += nji_host_lanes_##real##_##isa(&a2) + (double)rest2;                             \
    }                                                                                              \
                                                                                                   \
    TARGET static NJI_ALWAYS_INLINE void nji_host_row_back_##elem##_##isa(                         \
        const nji_host_panel *panel, int r, int64_t cols, real mean_g, real mean_gx, real scale,   \
        int want_dx, int want_params) {                                                            \
        typedef nji_##real##_##isa vec;                                                            \
        const nji_stored_##elem *x = NJI_ROW_OF(panel, x, r, const nji_stored_##elem),             \
                                *dy = NJI_ROW_OF(panel, dy, r, const nji_stored_##elem);           \
        nji_stored_##elem *out = want_dx ? NJI_ROW_OF(panel, out, r, nji_stored_##elem) : NULL;    \
        const real *gamma = (const real *)panel->gamma;                                            \
        real *dgamma = (real *)panel->dgamma, *dbeta = (real *)panel->dbeta;                       \
        real center = (real)panel->center[r], rstd = (real)panel->rstd[r];                         \
        int64_t x_ahead = panel->x_ahead, dy_ahead = panel->dy_ahead, c = 0;                       \
        for (; c + lanes <= cols; c += lanes) {                                                    \
            NJI_PREFETCH((const char *)(x + c) + x_ahead);                                         \
            NJI_PREFETCH((const char *)(dy + c) + dy_ahead);                                       \
            NJI_HOST_STEP(vec, NJI_GET_##elem##_##isa, NJI_PUT_##elem##_##isa)                     \
        }                                                                                          \
        for (; c < cols; c++) NJI_HOST_STEP(real, NJI_GET1_##elem, NJI_PUT1_##elem)                \
    }                                                                                              \
                                                                                                   \
    TARGET static void nji_host_sum_##elem##_##isa(nji_host_panel *panel, int64_t cols) {          \
        int r;                                                                                     \
        for (r = panel->begin; r < panel->end; r++)                                                \
            panel->sum[r] += nji_host_row_sum_##elem##_##isa(                                      \
                NJI_ROW_OF(panel, x, r, const nji_stored_##elem) + panel->first, cols,             \
                panel->ahead);                                                                     \
    }                                                                                              \
                                                                                                   \
    TARGET static void nji_host_moments_##elem##_##isa(nji_host_panel *panel, int64_t cols) {      \
        int r;                                                                                     \
        for (r = panel->begin; r < panel->end; r++)                                                \
            nji_host_row_moments_##elem##_##isa(                                                   \
                NJI_ROW_OF(panel, x, r, const nji_stored_##elem) + panel->first, cols,             \
                (real)panel->center[r], &panel->sum[r], &panel->square[r]);                        \
    }                                                                                              \
                                                                                                   \
    TARGET static void nji_host_forward_##elem##_##isa(const nji_host_panel *panel,                \
                                                       int64_t cols) {                             \
        typedef nji_##real##_##isa vec;                                                            \
        const real *gamma = (const real *)panel->gamma, *beta = (const real *)panel->beta;         \
        int64_t ahead = panel->x_ahead;                                                            \
        int r;                                                                                     \
        for (r = panel->begin; r < panel->end; r++) {                                              \
            const nji_stored_##elem *x = NJI_ROW_OF(panel, x, r, const nji_stored_##elem);         \
            nji_stored_##elem *y = NJI_ROW_OF(panel, out, r, nji_stored_##elem);                   \
            real center = (real)panel->center[r], shift = (real)panel->shift[r];                   \
            real rstd = (real)panel->rstd[r];                                                      \
            int64_t c = 0;                                                                         \
            for (; c + lanes <= cols; c += lanes) {                                                \
                vec h = (NJI_GET_##elem##_##isa(x + c) - center) * rstd + shift;                   \
                NJI_PREFETCH((const char *)(x + c) + ahead);                                       \
                NJI_PUT_##elem##_##isa(                                                            \
                    y + c, h * NJI_READ(vec, gamma + c) + NJI_READ(vec, beta + c), panel->stream); \
            }                                                                                      \
            for (; c < cols; c++)                                                                  \
                NJI_PUT1_##elem(                                                                   \
                    y + c,                                                                         \
                    ((NJI_GET1_##elem(x + c) - center) * rstd + shift) * gamma[c] + beta[c], 0);   \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    TARGET static void nji_host_backward_sums_##elem##_##isa(nji_host_panel *panel,                \
                                                             int64_t cols) {                       \
        int r;                                                                                     \
        for (r = panel->begin; r < panel->end; r++)                                                \
            nji_host_row_sums_##elem##_##isa(                                                      \
                NJI_ROW_OF(panel, x, r, const nji_stored_##elem) + panel->first,                   \
                NJI_ROW_OF(panel, dy, r, const nji_stored_##elem) + panel->first,                  \
                (const real *)panel->gamma + panel->first, cols, panel->ahead,                     \
                (real)panel->center[r], (real)panel->rstd[r], &panel->sum[r], &panel->square[r]);  \
    }                                                                                              \
                                                                                                   \
    TARGET static NJI_ALWAYS_INLINE void nji_host_backward_##elem##_##isa(                         \
        const nji_host_panel *panel, int64_t cols, int want_dx, int want_params) {                 \
        int r;                                                                                     \
        for (r = panel->begin; r < panel->end; r++)                                                \
            nji_host_row_back_##elem##_##isa(panel, r, cols, (real)panel->mean_g[r],               \
                                             (real)panel->mean_gx[r], (real)panel->scale[r],       \
                                             want_dx, want_params);                                \
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
    }                                                                                              \
                                                                                                   \
    TARGET static NJI_ALWAYS_INLINE void nji_host_whole_##elem##_##isa(                            \
        const nji_host_panel *panel, int64_t cols, int want_params) {                              \
        double n = (double)cols;                                                                   \
        int r;                                                                                     \
        for (r = panel->begin; r < panel->end; r++) {                                              \
            real rstd = (real)panel->rstd[r];                                                      \
            double sum = 0, square = 0;                                                            \
            nji_host_row_sums_##elem##_##isa(NJI_ROW_OF(panel, x, r, const nji_stored_##elem),     \
                                             NJI_ROW_OF(panel, dy, r, const nji_stored_##elem),    \
                                             (const real *)panel->gamma, cols, panel->ahead,       \
                                             (real)panel->center[r], rstd, &sum, &square);         \
            nji_host_row_back_##elem##_##isa(panel, r, cols, (real)(sum / n), (real)(square / n),  \
                                             cols == 1 ? 0 : rstd, 1, want_params);                \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    TARGET static void nji_host_whole_dx_##elem##_##isa(const nji_host_panel *panel,               \
                                                        int64_t cols) {                            \
        nji_host_whole_##elem##_##isa(panel, cols, 0);                                             \
    }                                                                                              \
    TARGET static void nji_host_whole_dx_params_##elem##_##isa(const nji_host_panel *panel,        \
                                                               int64_t cols) {                     \
        nji_host_whole_##elem##_##isa(panel, cols, 1);                                             \
    }

#define NJI_HOST_MATH_TABLE(isa, elem)                                                             \
    {                                                                                              \
        nji_host_sum_##elem##_##isa, nji_host_moments_##elem##_##isa,                              \
            nji_host_forward_##elem##_##isa, nji_host_backward_sums_##elem##_##isa,                \
            nji_host_dx_##elem##_##isa, nji_host_params_##elem##_##isa,                            \
            nji_host_dx_params_##elem##_##isa, nji_host_whole_dx_##elem##_##isa,                   \
            nji_host_whole_dx_params_##elem##_##isa                                                \
    }

/* Packed rows of 16-bit elements from and to float. */
#define NJI_HOST_ROWS_OF(isa, TARGET, elem, lanes)                                                 \
    TARGET static void nji_host_load_##elem##_##isa(const void *from, void *to, int64_t count) {   \
        const nji_stored_##elem *in = (const nji_stored_##elem *)from;                             \
        float *out = (float *)to;                                                                  \
        int64_t i = 0;                                                                             \
        for (; i + lanes <= count; i += lanes)                                                     \
            NJI_AT(nji_float_##isa, out + i) = NJI_GET_##elem##_##isa(in + i);                     \
        for (; i < count; i++) out[i] = NJI_GET1_##elem(in + i);                                   \
    }                                                                                              \
                                                                                                   \
    TARGET static void nji_host_store_##elem##_##isa(const void *from, void *to, int64_t count) {  \
        const float *in = (const float *)from;                                                     \
        nji_stored_##elem *out = (nji_stored_##elem *)to;                                          \
        int64_t i = 0;                                                                             \
        for (; i + lanes <= count; i += lanes)                                                     \
            NJI_PUT_##elem##_##isa(out + i, NJI_READ(nji_float_##isa, in + i), 0);                 \
        for (; i < count; i++) NJI_PUT1_##elem(out + i, in[i], 0);                                 \
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
    int streams;                                           /* can write past the caches */
} nji_host_isa;

#define NJI_HOST_NO_MATH                                                                           \
    { NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL }

NJI_HOST_ADDS(base, NJI_TARGET_BASE, float, half, NJI_BASE_LANES_float, 1)
NJI_HOST_ADDS(base, NJI_TARGET_BASE, double, base, NJI_BASE_LANES_double, 1)
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
    0};

#if NJI_HOST_X86
#define NJI_HOST_ISA(isa, TARGET, text, half, lanes, wide_lanes, pieces)                           \
    NJI_HOST_ADDS(isa, TARGET, float, half, lanes, pieces)                                         \
    NJI_HOST_ADDS(isa, TARGET, double, isa, wide_lanes, pieces)                                    \
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
        1};

NJI_HOST_ISA(avx2, NJI_TARGET_AVX2, "AVX2", base, 8, 4, 2)
NJI_HOST_ISA(avx512, NJI_TARGET_AVX512, "AVX-512", avx2, 16, 8, 4)
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

static void nji_host_fence(void) { /* also of what went past the caches */
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
    int is_forward;
    int wide;          /* arithmetic in double */
    int64_t real_size; /* bytes of float or double */
    int panel_dtype;   /* of x, dy and out in a panel: their own, or that of the arithmetic */
    int64_t panel_size;
    int64_t rows, cols;
    int in_place;  /* panels are whole rows, used where they lie */
    int64_t chunk; /* columns of a panel */
    int64_t pitch; /* elements between rows of a buffered panel */
    int64_t group; /* rows of a panel */
    int64_t batch; /* rows that are swept, then written, before the next are: all if buffered */
    int64_t part_rows, parts;
    int want_params, add_to_out, stream_out;
    int64_t sum_cols; /* cols, rounded up to whole cache lines */
    char *partial;    /* [parts][2][sum_cols] of float or double, in whole cache lines */
} nji_host_job;

/* One thread's buffers and the panel they serve. */
typedef struct nji_host_work {
    nji_host_panel panel;
    int64_t offset[NJI_HOST_ROWS]; /* of the rows of the operand in hand; elements */
    int64_t row;                   /* first row of the panel */
    int rows;
    int64_t param_col;  /* columns of gamma and beta that are loaded; -1: none */
    char *gamma, *beta; /* room for a chunk of each */
    char *x, *other;    /* for a panel, unless rows are in place; other: dy, then out */
    char *sums; /* for sums of dgamma and dbeta over some rows of a part; NULL: they do not fit */
    NJI_CACHE_ALIGNED double room[NJI_HOST_ROOM_BYTES / 8];
} nji_host_work;

/* The offset of a row, and how far apart it and its neighbours are (elements); see
   nji_host_row_run. */
static int64_t nji_host_row_place(const nji_problem *problem, const long long *stride, int64_t row,
                                  int64_t *apart) {
    int last = problem->row_dims - 1, d;
    int64_t at = 0;
    *apart = last < 0 ? 0 : stride[last];
    if (last <= 0) return row * *apart;
    for (d = last; d >= 0; d--) {
        at += row % problem->extent[d] * stride[d];
        row /= problem->extent[d];
    }
    return at;
}

/* The rows from `row` on, at most `count`, that are evenly spaced in every operand. */
static int64_t nji_host_row_run(const nji_problem *problem, int64_t row, int64_t count) {
    int64_t extent = problem->row_dims > 1 ? problem->extent[problem->row_dims - 1] : 0;
    return extent ? nji_min_i64(count, extent - row % extent) : count;
}

/* Offsets of `count` rows from `row` on. */
static void nji_host_row_offsets(const nji_problem *problem, const long long *stride, int64_t row,
                                 int count, int64_t *offset) {
    int64_t index[NJI_DIMS], at = 0;
    int d, r;
    if (problem->row_dims <= 1) {
        int64_t step = problem->row_dims ? stride[0] : 0;
        for (r = 0; r < count; r++) offset[r] = (row + r) * step;
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
    for (r = 0; r < rows; r++) row_at[r] = r * job->pitch;
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
    for (r = 0; r < rows; r++) row_at[r] = r * job->pitch;
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

/* Points at the panel's rows of an input: in place, or at a copy in `buffer`. *step: bytes. */
static const char *nji_host_fetch(const nji_host_job *job, nji_host_work *work,
                                  const nji_host_view *view, int64_t col, int64_t count,
                                  char *buffer, int64_t *step) {
    int64_t apart, at = nji_host_row_place(job->problem, view->row_stride, work->row, &apart);
    if (view->direct) {
        *step = apart * job->panel_size;
        return view->data + (at + col) * job->panel_size;
    }
    nji_host_row_offsets(job->problem, view->row_stride, work->row, work->rows, work->offset);
    nji_host_load(job, view, work->offset, work->rows, col, count, buffer);
    *step = job->pitch * job->panel_size;
    return buffer;
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
    if (job->is_forward)
        work->panel.beta = nji_host_fetch_param(job, &job->beta, col, count, work->beta);
    work->param_col = col;
}

/* Columns rounded up to whole cache lines. */
static int64_t nji_host_sum_cols(int64_t cols, int64_t real_size) {
    return nji_ceil_div(cols, NJI_HOST_LINE / real_size) * (NJI_HOST_LINE / real_size);
}

/* Bytes of a thread's room for chunks of gamma and of beta, unless they are used where they lie. */
static int64_t nji_host_gamma_bytes(const nji_host_job *job) {
    return job->gamma.direct ? 0 : nji_host_sum_cols(job->chunk, job->real_size) * job->real_size;
}

static int64_t nji_host_beta_bytes(const nji_host_job *job) {
    if (!job->is_forward || job->beta.direct) return 0;
    return nji_host_sum_cols(job->chunk, job->real_size) * job->real_size;
}

/* Whether a row is so long that fetching the next one while this one is written would push this
   one out of the nearest cache. */
static int nji_host_is_long(const nji_host_job *job) {
    return job->cols * job->panel_size > NJI_HOST_LONG_ROW;
}

/* Bytes to a row that is due soon; 0 if rows have no one distance. */
static int64_t nji_host_ahead(const nji_host_job *job, const nji_host_view *view) {
    if (!job->in_place || nji_host_is_long(job)) return 0;
    if (job->problem->row_dims != 1 || job->cols == 0) return 0;
    return nji_ceil_div(NJI_HOST_AHEAD_BYTES, job->batch * job->cols * job->panel_size) *
           job->batch * view->row_stride[0] * job->panel_size;
}

/* Readies a thread's room: no columns of gamma and beta loaded; 1 and 0 if they are absent. */
static void nji_host_begin_work(const nji_host_job *job, nji_host_work *work) {
    char *end = (char *)work->room + NJI_HOST_ROOM_BYTES;
    int64_t c;
    work->gamma = (char *)work->room;
    work->beta = work->gamma + nji_host_gamma_bytes(job);
    work->x = work->beta + nji_host_beta_bytes(job);
    work->other = work->x + NJI_HOST_BUFFER_BYTES;
    work->sums = NULL;
    if (job->in_place && job->want_params && 2 * job->sum_cols * job->real_size <= end - work->x)
        work->sums = work->x;
    work->param_col = -1;
    work->panel.first = 0;
    work->panel.stream = job->stream_out;
    work->panel.ahead = job->in_place && nji_host_is_long(job) ? NJI_HOST_AHEAD_IN_ROW : 0;
    work->panel.x_ahead = nji_host_ahead(job, &job->x);
    work->panel.dy_ahead = job->dy.data ? nji_host_ahead(job, &job->dy) : 0;
    for (c = 0; c < job->chunk && !job->gamma.data; c++) {
        if (job->wide) ((double *)work->gamma)[c] = 1;
        else ((float *)work->gamma)[c] = 1;
    }
    if (job->is_forward && !job->beta.data)
        memset(work->beta, 0, (size_t)(job->chunk * job->real_size));
}

/* Whether the panel holds whole rows: then they are fetched once. */
static int nji_host_one_chunk(const nji_host_job *job) {
    return job->cols <= job->chunk;
}

/* Points the panel at its rows of the output, or at a buffer that nji_host_end_out will write
   from. */
static void nji_host_begin_out(const nji_host_job *job, nji_host_work *work, int64_t col) {
    nji_host_panel *panel = &work->panel;
    int64_t apart, at = nji_host_row_place(job->problem, job->out.row_stride, work->row, &apart);
    if (job->out.direct && !job->add_to_out) {
        panel->out = job->out.data + (at + col) * job->panel_size;
        panel->out_step = apart * job->panel_size;
    } else {
        panel->out = work->other;
        panel->out_step = job->pitch * job->panel_size;
    }
}

static void nji_host_end_out(const nji_host_job *job, nji_host_work *work, int64_t col,
                             int64_t count) {
    int r;
    if (job->out.direct && !job->add_to_out) return;
    nji_host_row_offsets(job->problem, job->out.row_stride, work->row, work->rows, work->offset);
    for (r = 0; r < work->rows && job->add_to_out; r++) { /* x's buffer is free by now */
        nji_host_load(job, &job->out, work->offset + r, 1, col, count, work->x);
        job->isa->add[job->wide](work->other + r * job->pitch * job->panel_size, work->x, count);
    }
    nji_host_store(job, &job->out, work->offset, work->rows, col, count, work->other);
}

/* ---- one part of the rows ------------------------------------------------------------------- */

static void nji_host_read_stats(const nji_host_job *job, nji_host_work *work,
                                const nji_operand *stat, double *value) {
    const nji_host_type *type = &nji_host_types[job->stat_dtype];
    int64_t zero = 0, done, run, at, step;
    if (!stat->data) { /* dbeta alone: no statistic is given, none matters */
        memset(value, 0, (size_t)work->rows * sizeof *value);
        return;
    }
    for (done = 0; done < work->rows; done += run) {
        run = nji_host_row_run(job->problem, work->row + done, work->rows - done);
        at = nji_host_row_place(job->problem, stat->stride, work->row + done, &step);
        type->load[1]((const char *)stat->data + at * type->size, &zero, step, value + done, &zero,
                      1, 1, run, 0);
    }
}

static void nji_host_write_stats(const nji_host_job *job, nji_host_work *work,
                                 const nji_operand *stat, const double *value) {
    const nji_host_type *type = &nji_host_types[job->stat_dtype];
    int64_t zero = 0, done, run, at, step;
    if (!stat->data) return;
    for (done = 0; done < work->rows; done += run) {
        run = nji_host_row_run(job->problem, work->row + done, work->rows - done);
        at = nji_host_row_place(job->problem, stat->stride, work->row + done, &step);
        type->store[1](value + done, &zero, 1, (char *)stat->data + at * type->size, &zero, step, 1,
                       run, 0);
    }
}

/* The value rounded to the type of the arithmetic. */
static double nji_host_round(const nji_host_job *job, double value) {
    return job->wide ? value : (double)(float)value;
}

/* Points the panel at its rows of x and dy, at a chunk of their columns. */
static void nji_host_fetch_rows(const nji_host_job *job, nji_host_work *work, int64_t col,
                                int64_t count) {
    nji_host_panel *panel = &work->panel;
    panel->x = nji_host_fetch(job, work, &job->x, col, count, work->x, &panel->x_step);
    if (job->dy.data)
        panel->dy = nji_host_fetch(job, work, &job->dy, col, count, work->other, &panel->dy_step);
}

/* Takes `step` over all columns of the rows in hand. `fetched`: by an earlier sweep. */
static void nji_host_sweep(const nji_host_job *job, nji_host_work *work,
                           void (*step)(nji_host_panel *, int64_t), int fetched) {
    nji_host_panel *panel = &work->panel;
    int64_t most = job->in_place ? NJI_HOST_SWEEP_COLS : job->chunk, col, count;
    for (col = 0; col < job->cols; col += count) {
        count = nji_min_i64(most, job->cols - col);
        if (job->in_place) {
            panel->first = col;
        } else if (!fetched || !nji_host_one_chunk(job)) {
            nji_host_fetch_rows(job, work, col, count);
            nji_host_fetch_params(job, work, col, count);
        }
        step(panel, count);
    }
    panel->first = 0;
}

/* Mean and rstd of the rows in hand, by two sweeps: the second measures from the first's mean,
   which corrects that mean and cancels nothing however large |mean| is against the deviation. */
static void nji_host_row_stats(const nji_host_job *job, nji_host_work *work) {
    nji_host_panel *panel = &work->panel;
    double n = (double)job->cols;
    int r;
    for (r = panel->begin; r < panel->end; r++) panel->sum[r] = 0;
    nji_host_sweep(job, work, job->math->sum, 0);
    for (r = panel->begin; r < panel->end; r++) {
        panel->center[r] = nji_host_round(job, panel->sum[r] / n);
        panel->sum[r] = panel->square[r] = 0;
    }
    nji_host_sweep(job, work, job->math->moments, 1);
    for (r = panel->begin; r < panel->end; r++) {
        /* a mean that is no number cannot be corrected, and its deviations are none either */
        int finite = panel->center[r] - panel->center[r] == 0;
        double off = finite ? panel->sum[r] / n : 0; /* true mean less center */
        double variance = panel->square[r] / n - off * off;
        if (variance < 0) variance = 0; /* NaN stays */
        panel->mean[r] = nji_host_round(job, panel->center[r] + off);
        panel->rstd[r] = nji_host_round(job, 1 / sqrt(variance + job->problem->eps));
        panel->shift[r] = -off * panel->rstd[r];
    }
}

/* The two means over the columns that dx needs. */
static void nji_host_row_means(const nji_host_job *job, nji_host_work *work) {
    nji_host_panel *panel = &work->panel;
    double n = (double)job->cols;
    int r;
    for (r = panel->begin; r < panel->end; r++) panel->sum[r] = panel->square[r] = 0;
    nji_host_sweep(job, work, job->math->backward_sums, 0);
    for (r = panel->begin; r < panel->end; r++) {
        panel->mean_g[r] = panel->sum[r] / n;
        panel->mean_gx[r] = panel->square[r] / n;
        /* one column: dx is 0, and not the rounding error that a fused multiply-add leaves */
        panel->scale[r] = job->cols == 1 ? 0 : panel->rstd[r];
    }
}

/* Readies a panel of the rows from `row` on, before `end`: all of it when rows are in place. */
static void nji_host_open_panel(const nji_host_job *job, nji_host_work *work, int64_t row,
                                int64_t end) {
    int64_t rows = nji_min_i64(job->group, end - row);
    if (job->x.direct || job->dy.direct || job->out.direct)
        rows = nji_host_row_run(job->problem, row, rows);
    work->row = row;
    work->rows = (int)rows;
    work->panel.begin = 0;
    work->panel.end = work->rows;
    if (!job->in_place) return;
    nji_host_fetch_rows(job, work, 0, job->cols);
    if (job->out.data) nji_host_begin_out(job, work, 0);
    nji_host_fetch_params(job, work, 0, job->cols);
}

/* Takes the next batch of the panel's rows in hand; 0: there is none. */
static int nji_host_next_batch(const nji_host_job *job, nji_host_work *work, int *done) {
    work->panel.begin = *done;
    work->panel.end = *done = (int)nji_min_i64(*done + job->batch, work->rows);
    return work->panel.begin < work->panel.end;
}

static void nji_host_forward_panel(const nji_host_job *job, nji_host_work *work) {
    nji_host_panel *panel = &work->panel;
    int64_t col, count;
    int done = 0;
    while (nji_host_next_batch(job, work, &done)) {
        nji_host_row_stats(job, work);
        if (job->in_place) {
            job->math->forward(panel, job->cols);
            continue;
        }
        for (col = 0; col < job->cols; col += count) {
            count = nji_min_i64(job->chunk, job->cols - col);
            if (!nji_host_one_chunk(job)) nji_host_fetch_rows(job, work, col, count);
            nji_host_fetch_params(job, work, col, count);
            nji_host_begin_out(job, work, col);
            job->math->forward(panel, count);
            nji_host_end_out(job, work, col, count);
        }
    }
    nji_host_write_stats(job, work, &job->problem->mean, panel->mean);
    nji_host_write_stats(job, work, &job->problem->rstd, panel->rstd);
}

/* dgamma, dbeta: the part's sums, or NULL. */
static void nji_host_backward_panel(const nji_host_job *job, nji_host_work *work, char *dgamma,
                                    char *dbeta) {
    nji_host_panel *panel = &work->panel;
    int want_dx = job->out.data != NULL, done = 0;
    void (*write)(const nji_host_panel *, int64_t) = !want_dx           ? job->math->params
                                                     : job->want_params ? job->math->dx_params
                                                                        : job->math->dx;
    int whole = want_dx && job->in_place && job->cols <= NJI_HOST_SWEEP_COLS;
    int64_t col, count;
    nji_host_read_stats(job, work, &job->problem->mean, panel->center);
    nji_host_read_stats(job, work, &job->problem->rstd, panel->rstd);
    panel->dgamma = dgamma;
    panel->dbeta = dbeta;
    if (whole) {
        (job->want_params ? job->math->whole_dx_params : job->math->whole_dx)(panel, job->cols);
        return;
    }
    while (nji_host_next_batch(job, work, &done)) {
        if (want_dx) nji_host_row_means(job, work);
        if (job->in_place) {
            write(panel, job->cols);
            continue;
        }
        for (col = 0; col < job->cols; col += count) {
            count = nji_min_i64(job->chunk, job->cols - col);
            if (!want_dx || !nji_host_one_chunk(job)) nji_host_fetch_rows(job, work, col, count);
            nji_host_fetch_params(job, work, col, count);
            if (job->want_params) {
                panel->dgamma = dgamma + col * job->real_size;
                panel->dbeta = dbeta + col * job->real_size;
            }
            if (want_dx) nji_host_begin_out(job, work, col);
            write(panel, count);
            if (want_dx) nji_host_end_out(job, work, col, count);
        }
    }
}

static void nji_host_forward_part(const nji_host_job *job, int64_t part) {
    nji_host_work work;
    int64_t row = part * job->part_rows, end = nji_min_i64(row + job->part_rows, job->rows);
    nji_host_begin_work(job, &work);
    for (; row < end; row += work.rows) {
        nji_host_open_panel(job, &work, row, end);
        nji_host_forward_panel(job, &work);
    }
}

/* Puts a thread's sums, of the rows from `summed` on, with those of the part. Whole rows are summed
   in the thread's room, which stays in its caches from part to part. */
static void nji_host_keep_sums(const nji_host_job *job, const nji_host_work *work, int64_t part,
                               int64_t summed, char *total) {
    if (!work->sums) return;
    if (summed == part * job->part_rows)
        memcpy(total, work->sums, (size_t)(2 * job->sum_cols * job->real_size));
    else job->isa->add[job->wide](total, work->sums, 2 * job->sum_cols);
}

static void nji_host_backward_part(const nji_host_job *job, int64_t part) {
    nji_host_work work;
    int64_t row = part * job->part_rows, end = nji_min_i64(row + job->part_rows, job->rows);
    int64_t bytes = job->want_params ? job->sum_cols * job->real_size : 0, summed = row;
    char *total = job->partial + part * 2 * bytes, *sums;
    nji_host_begin_work(job, &work);
    sums = work.sums ? work.sums : total;
    if (bytes > 0) memset(sums, 0, (size_t)(2 * bytes));
    for (; row < end; row += work.rows) {
        if (work.sums && row - summed >= NJI_HOST_SUM_ROWS) {
            nji_host_keep_sums(job, &work, part, summed, total);
            memset(sums, 0, (size_t)(2 * bytes));
            summed = row;
        }
        nji_host_open_panel(job, &work, row, end);
        nji_host_backward_panel(job, &work, sums, sums + bytes);
    }
    nji_host_keep_sums(job, &work, part, summed, total);
}

/* ---- parameter gradients -------------------------------------------------------------------- */

/* Adds the parts' sums of some columns in order and in double, then rounds once. */
static void nji_host_finish_param(const nji_host_job *job, const nji_host_view *view, int which,
                                  int64_t col, int64_t count) {
    double sum[NJI_HOST_FINISH_COLS], old[NJI_HOST_FINISH_COLS];
    int adds = (job->problem->accumulate & (which ? NJ_GRAD_DBETA : NJ_GRAD_DGAMMA)) != 0;
    int64_t zero = 0, part, done, run, at, step, c;
    if (!view->data || (adds && job->parts == 0)) return;
    for (c = 0; c < count; c++) sum[c] = 0;
    for (part = 0; part < job->parts; part++)
        job->isa->add_wide[job->wide](
            sum, job->partial + ((part * 2 + which) * job->sum_cols + col) * job->real_size, count);
    for (done = 0; done < count; done += run) {
        char *base;
        run =
            nji_host_col_run(job->problem, view->col_stride, col + done, count - done, &at, &step);
        base = view->data + at * view->type->size;
        if (adds) {
            view->type->load[1](base, &zero, step, old, &zero, 1, 1, run, 0);
            for (c = 0; c < run; c++) sum[done + c] += old[c];
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
   the result's bits. Workspace: at most 64 parts or 1 MiB, whichever is more, of 2*cols sums, each
   row of sums in cache lines of its own. */
static void nji_host_split(int64_t rows, int64_t cols, int64_t real_size, int64_t *part_rows,
                           int64_t *parts) {
    int64_t sum_cols = nji_host_sum_cols(cols > 0 ? cols : 1, real_size);
    int64_t most = NJI_HOST_PARTIAL_BYTES / 2 / real_size / sum_cols;
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
    cols = nji_host_sum_cols(cols, nji_host_real_size(desc));
    if (!nji_mul_i64(parts, 2 * nji_host_real_size(desc), &bytes) ||
        !nji_mul_i64(bytes, cols, &bytes) || !nji_add_i64(bytes, NJI_HOST_LINE, &bytes))
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

/* Chooses the shape of panels. */
static void nji_host_shape_panel(nji_host_job *job) {
    int along_rows = job->x.along_rows || job->dy.along_rows || job->out.along_rows;
    int64_t cols = job->cols > 0 ? job->cols : 1, row_bytes = cols * job->panel_size;
    job->chunk = cols; /* for now, as if rows were used in place: whether gamma and beta fit */
    job->in_place = job->x.direct && (!job->dy.data || job->dy.direct) &&
                    (!job->out.data || job->out.direct) && !job->add_to_out &&
                    nji_host_gamma_bytes(job) <= NJI_HOST_ROOM_BYTES &&
                    nji_host_gamma_bytes(job) + nji_host_beta_bytes(job) <= NJI_HOST_ROOM_BYTES;
    if (job->in_place) {
        job->group = NJI_HOST_ROWS;
        job->batch = !job->is_forward || row_bytes > NJI_HOST_SHORT_ROW
                         ? 1
                         : nji_min_i64(NJI_HOST_BATCH_BYTES / row_bytes, NJI_HOST_ROWS);
        return;
    }
    /* where rows lie together, panels are tall: then memory is walked by whole cache lines */
    job->chunk = nji_min_i64(NJI_HOST_CHUNK_BYTES / job->real_size / (along_rows ? 4 : 1), cols);
    job->pitch = job->chunk + NJI_HOST_PAD_BYTES / job->panel_size;
    job->group = nji_min_i64(NJI_HOST_PANEL_BYTES / job->panel_size / job->chunk, NJI_HOST_ROWS);
    job->batch = job->group;
}

/* Chooses the shape of parts, and how the output is written. */
static void nji_host_shape_job(nji_host_job *job) {
    int64_t lanes = job->isa->vector_bytes / job->real_size, d;
    nji_host_shape_panel(job);
    if (job->want_params) {
        nji_host_split(job->rows, job->cols, job->real_size, &job->part_rows, &job->parts);
    } else {
        int64_t cols = job->cols > 0 ? job->cols : 1;
        job->part_rows = (NJI_HOST_PARALLEL_FROM / cols / job->group + 1) * job->group;
        job->parts = nji_ceil_div(job->rows, job->part_rows);
    }
    /* rows of whole vectors, that start on 16 bytes */
    job->stream_out = job->isa->streams && job->out.data && job->out.direct && !job->add_to_out &&
                      job->rows * job->cols * job->panel_size >= NJI_HOST_STREAM_FROM &&
                      job->cols % lanes == 0 && (uintptr_t)job->out.data % 16 == 0 &&
                      job->out.data != job->x.data && job->out.data != job->dy.data;
    for (d = 0; d < job->problem->row_dims && job->out.data; d++)
        if (job->out.row_stride[d] * job->panel_size % 16 != 0) job->stream_out = 0;
}

/* Runs the tasks, in any order and on any thread; what they wrote past the caches is then seen.
   Each thread takes neighbours, since what it fetches ahead at the end of one starts the next. */
static void nji_host_for_each(void (*task)(const nji_host_job *, int64_t), const nji_host_job *job,
                              int64_t count) {
    int64_t i;
#ifdef _OPENMP
    if (count > 1 && job->rows * job->cols >= NJI_HOST_PARALLEL_FROM) {
#pragma omp parallel
        {
#pragma omp for schedule(static) nowait
            for (i = 0; i < count; i++) task(job, i);
            nji_host_fence();
        }
        return;
    }
#endif
    for (i = 0; i < count; i++) task(job, i);
    nji_host_fence();
}

/* Computes the problem; all is validated and desc has no defaults left. Needs no memory but the
   workspace (16-byte aligned) and some 104 KB of stack per thread. */
static void nji_host_run(const nj_desc *desc, const nji_problem *problem, void *workspace) {
    nji_host_job job;
    unsigned grads = desc->op == NJ_OP_LAYER_NORM_FORWARD ? 0 : problem->grads;
    job.problem = problem;
    job.isa = nji_host_pick_isa();
    job.is_forward = desc->op == NJ_OP_LAYER_NORM_FORWARD;
    job.wide = desc->dtype == NJ_F64;
    job.real_size = nji_host_real_size(desc);
    job.rows = problem->rows;
    job.cols = problem->cols;
    job.stat_dtype = (int)desc->stat_dtype;
    job.sum_cols = nji_host_sum_cols(job.cols, job.real_size);
    job.partial = (char *)workspace;
    job.partial += (0 - (uintptr_t)workspace) % NJI_HOST_LINE;
    job.want_params = (grads & (NJ_GRAD_DGAMMA | NJ_GRAD_DBETA)) != 0;
    job.add_to_out = (grads & problem->accumulate & NJ_GRAD_DX) != 0;
    /* dbeta alone comes without x: dy stands in for it, and what is made of it goes nowhere */
    job.x =
        nji_host_make_view(&job, problem->x.data ? &problem->x : &problem->dy, (int)desc->dtype, 1);
    job.dy = nji_host_make_view(&job, &problem->dy, (int)desc->dtype, !job.is_forward);
    job.gamma = nji_host_make_view(&job, &problem->gamma, (int)desc->param_dtype, 1);
    job.beta = nji_host_make_view(&job, &problem->beta, (int)desc->param_dtype, job.is_forward);
    job.dgamma = nji_host_make_view(&job, &problem->dgamma, (int)desc->param_dtype,
                                    (grads & NJ_GRAD_DGAMMA) != 0);
    job.dbeta = nji_host_make_view(&job, &problem->dbeta, (int)desc->param_dtype,
                                   (grads & NJ_GRAD_DBETA) != 0);
    job.out = job.is_forward ? nji_host_make_view(&job, &problem->y, (int)desc->dtype, 1)
                             : nji_host_make_view(&job, &problem->dx, (int)desc->dtype,
                                                  (grads & NJ_GRAD_DX) != 0);
    nji_host_choose_panel(&job);
    nji_host_shape_job(&job);
    nji_host_for_each(job.is_forward ? nji_host_forward_part : nji_host_backward_part, &job,
                      job.parts);
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
