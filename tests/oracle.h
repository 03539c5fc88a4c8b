/* LayerNorm forward and backward by the formulas in api.h, and how far arithmetic of a given unit
   roundoff may be from them. Naive on purpose: it shares nothing with the library but the formulas.

   Values are computed in long double (64 bits of significand on x86), so that they can judge f64.

   Error bounds, first order, u = unit roundoff of the arithmetic, t = its smallest subnormal:
   - A sum of n terms is off by at most growth(n)*u*sum|terms|. For a short sum growth is n, the
   worst case. A long one is split among lanes or threads and its roundings are independent: they
   add up like a random walk, for n addends in one lane to about sqrt(n)/3, so sqrt(n) is three
   deviations of the least favourable order.
   - A product, quotient or difference adds u of its own result; rsqrt in hardware some more.
   The scale is always made of operands, never of the result: a result whose true value is 0 (one
   column, constant rows) still has a bound. */
#ifndef TESTS_ORACLE_H
#define TESTS_ORACLE_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct estimate {
    double value;
    double error; /* what a faithful implementation may be off, before it rounds the result to store
                     it */
} estimate;

typedef struct oracle {
    int64_t rows, cols;
    const double *x, *dy;       /* rows x cols, row-major; dy for a backward */
    const double *gamma, *beta; /* cols; NULL: 1 and 0 */
    double eps;
    double unit, tiny; /* of the arithmetic judged: 2^-24 and 2^-149 for f32 */
} oracle;

static inline long double oracle_growth(int64_t n) {
    long double walk = 4 + sqrtl((long double)n);
    return (long double)n < walk ? (long double)n : walk;
}

static inline long double oracle_weight(const oracle *o, int64_t col) {
    return o->gamma ? o->gamma[col] : 1.0L;
}

/* mean, rstd: rows. y: rows x cols. */
static inline void oracle_forward(const oracle *o, estimate *mean, estimate *rstd, estimate *y) {
    const long double u = o->unit, growth = oracle_growth(o->cols);
    for (int64_t r = 0; r < o->rows; r++) {
        const double *x = o->x + r * o->cols;
        long double sum = 0, absolute = 0, squares = 0;
        for (int64_t c = 0; c < o->cols; c++) {
            sum += x[c];
            absolute += fabsl(x[c]);
        }
        const long double m = sum / o->cols; /* no columns: 0/0, the NaN that api.h promises */
        const long double m_error = (growth + 1) * u * absolute / o->cols + o->tiny;
        for (int64_t c = 0; c < o->cols; c++) squares += (x[c] - m) * (x[c] - m);
        const long double variance = squares / o->cols;
        const long double s = 1 / sqrtl(variance + o->eps);
        /* A mean that is off by d adds d*d to the variance; the root halves a relative error. The 5
           roundings: of eps, its sum, the root, the reciprocal, and one more for the hardware's. */
        const long double s_relative =
            ((growth + 4) * u * variance + m_error * m_error) / (2 * (variance + o->eps)) + 5 * u;
        mean[r].value = (double)m;
        mean[r].error = (double)m_error;
        rstd[r].value = (double)s;
        rstd[r].error = (double)(s_relative * s);
        for (int64_t c = 0; c < o->cols; c++) {
            const long double xhat = (x[c] - m) * s, w = oracle_weight(o, c);
            const long double value = xhat * w + (o->beta ? o->beta[c] : 0);
            const long double xhat_error =
                fabsl(xhat) * (s_relative + 2 * u) + s * m_error + o->tiny;
            y[r * o->cols + c].value = (double)value;
            y[r * o->cols + c].error =
                (double)(fabsl(w) * xhat_error + u * (fabsl(xhat * w) + fabsl(value)) + o->tiny);
        }
    }
}

/* The statistics are operands: with error 0 they are what the judged backward read, bit for bit;
   otherwise it may have read anything within the error. dx: rows x cols. dgamma, dbeta: cols. */
static inline void oracle_backward(const oracle *o, const estimate *mean, const estimate *rstd,
                                   estimate *dx, estimate *dgamma, estimate *dbeta) {
    typedef struct column {
        long double gamma, gamma_scale, gamma_error, beta, beta_scale;
    } column;
    const long double u = o->unit, growth = oracle_growth(o->cols), n = (long double)o->cols;
    const long double rows_growth = oracle_growth(o->rows);
    column *sums = (column *)calloc((size_t)o->cols + 1, sizeof *sums);
    for (int64_t r = 0; r < o->rows; r++) {
        const double *x = o->x + r * o->cols, *dy = o->dy + r * o->cols;
        const long double m = mean[r].value, s = rstd[r].value;
        const long double s_relative = rstd[r].error == 0 ? 0 : rstd[r].error / s;
        const long double far = s * (mean[r].error + o->tiny) + o->tiny;
        long double sum_g = 0, sum_gx = 0, scale_g = 0, scale_gx = 0, error_gx = 0;
        for (int64_t c = 0; c < o->cols; c++) {
            const long double xhat = (x[c] - m) * s, g = dy[c] * oracle_weight(o, c);
            const long double xhat_error = fabsl(xhat) * (s_relative + 2 * u) + far;
            sum_g += g;
            sum_gx += g * xhat;
            scale_g += fabsl(g);
            scale_gx += fabsl(g * xhat);
            error_gx += fabsl(g) * xhat_error;
            sums[c].gamma += dy[c] * xhat;
            sums[c].gamma_scale += fabsl(dy[c] * xhat);
            sums[c].gamma_error += fabsl(dy[c]) * xhat_error + o->tiny;
            sums[c].beta += dy[c];
            sums[c].beta_scale += fabsl(dy[c]);
        }
        const long double mean_g = sum_g / n, mean_gx = sum_gx / n;
        const long double mean_g_error = (growth + 2) * u * scale_g / n;
        const long double mean_gx_error = ((growth + 3) * u * scale_gx + error_gx) / n;
        for (int64_t c = 0; c < o->cols; c++) {
            const long double xhat = (x[c] - m) * s, g = dy[c] * oracle_weight(o, c);
            const long double xhat_error = fabsl(xhat) * (s_relative + 2 * u) + far;
            const long double value = s * (g - mean_g - xhat * mean_gx);
            const long double roundings = fabsl(g) + fabsl(mean_g) + fabsl(xhat * mean_gx);
            dx[r * o->cols + c].value = (double)value;
            dx[r * o->cols + c].error =
                (double)(s * (mean_g_error + fabsl(xhat) * mean_gx_error +
                              fabsl(mean_gx) * xhat_error + 4 * u * roundings) +
                         fabsl(value) * (s_relative + u) + (1 + s) * o->tiny);
        }
    }
    for (int64_t c = 0; c < o->cols; c++) {
        dgamma[c].value = (double)sums[c].gamma;
        dgamma[c].error =
            (double)((rows_growth + 2) * u * sums[c].gamma_scale + sums[c].gamma_error);
        dbeta[c].value = (double)sums[c].beta;
        dbeta[c].error = (double)(rows_growth * u * sums[c].beta_scale);
    }
    free(sums);
}

#endif
