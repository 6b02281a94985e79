/* Float32 kernels of a decoder layer for CPUs: add and norm, routing, experts, paged attention.
 *
 * Plain C with vector types of GCC and Clang, compiled for this machine by `build.py`; no headers
 * of torch or Python. Everything is row-major and belongs to the caller; nothing is kept between
 * calls, so that any thread may call. Callers are moe/backends/cpu_native.py and
 * layers/attention_native.py.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(64), aligned(4), may_alias));

/* Accumulators of a matrix tile: rows x vectors, as many as the registers hold. */
#ifdef __AVX512F__
#define TILE_ROWS 6
#define TILE_VECS 4
#else
#define TILE_ROWS 3
#define TILE_VECS 2
#endif
/* Columns of a block of weights; `cpu_native.py` has the same number. */
#define BLOCK 64
/* Queries that share a page of keys while it is in the first cache. */
#define BLOCK_QUERIES 8
#define PAGE LANES

#define INLINE static inline __attribute__((always_inline))

INLINE vec splat(float x) {
    vec out;
    for (int i = 0; i < LANES; i++) out[i] = x;
    return out;
}

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec v) { *(vec *)p = v; }

INLINE float sum(vec v) {
    float part[LANES];
    memcpy(part, &v, sizeof part);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) part[i] += part[i + width];
    return part[0];
}

INLINE float largest(vec v) {
    float part[LANES];
    memcpy(part, &v, sizeof part);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            part[i] = part[i] < part[i + width] ? part[i + width] : part[i];
    return part[0];
}

INLINE vec choose(ivec mask, vec yes, vec no) {
    return (vec)((mask & (ivec)yes) | (~mask & (ivec)no));
}

/* exp(x) to about one unit in the last place; 0 below the smallest normal, NaN stays. */
INLINE vec exp_vec(vec x) {
    const vec low = splat(-87.33654f), high = splat(88.37626f);
    const ivec is_zero = x < low;
    x = choose(x > high, high, choose(is_zero, low, x));
    /* Adding 1.5 * 2^23 rounds to a whole number. */
    const vec magic = splat(12582912.0f);
    vec n = x * 1.44269504f + magic;
    n -= magic;
    vec r = x - n * 0.693359375f;
    r -= n * -2.12194440e-4f;
    /* Coefficients: Cephes' expf (Moshier). */
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    return choose(is_zero, splat(0.0f), p * (vec)power);
}

/* residual [T, H] += x (where given); out = residual / rms(residual) * weight. */
void moeserve_add_norm(const float *x, float *residual, const float *weight, float *out,
                       int64_t T, int64_t H, float eps) {
    for (int64_t t = 0; t < T; t++) {
        float *row = residual + t * H;
        vec squares = splat(0.0f);
        for (int64_t i = 0; i < H; i += LANES) {
            vec v = load(row + i);
            if (x) {
                v += load(x + t * H + i);
                store(row + i, v);
            }
            squares += v * v;
        }
        const float scale = 1.0f / sqrtf(sum(squares) / (float)H + eps);
        for (int64_t i = 0; i < H; i += LANES)
            store(out + t * H + i, load(row + i) * scale * load(weight + i));
    }
}

/* ---- routing -------------------------------------------------------------------------------- */

/* The rule of moe/routing.py for values that are no numbers; returns whether there was a NaN. */
static int sanitise(const float *in, float *out, int64_t E) {
    int has_nan = 0, has_finite = 0;
    for (int64_t e = 0; e < E; e++) {
        float v = in[e];
        if (isnan(v)) { has_nan = 1; v = -INFINITY; }
        if (v == INFINITY) v = FLT_MAX;
        has_finite |= v != -INFINITY;
        out[e] = v;
    }
    if (!has_finite) memset(out, 0, (size_t)E * sizeof(float));
    return has_nan;
}

/* Softmax routing: ids and weights [T, K] by falling logit, ties to the lowest id.
 * work: E floats and E bytes. Returns the number of rows that held a NaN. */
int64_t moeserve_route(const float *logits, int64_t T, int64_t E, int64_t K, int is_renormalized,
                       float scaling, int32_t *ids, float *weights, float *work) {
    int64_t nan_rows = 0;
    char *taken = (char *)(work + E);
    for (int64_t t = 0; t < T; t++) {
        nan_rows += sanitise(logits + t * E, work, E);
        int32_t *id = ids + t * K;
        float *weight = weights + t * K;
        memset(taken, 0, (size_t)E);
        for (int64_t k = 0; k < K; k++) {
            int64_t best = -1;
            for (int64_t e = 0; e < E; e++)
                if (!taken[e] && (best < 0 || work[e] > work[best])) best = e;
            taken[best] = 1;
            id[k] = (int32_t)best;
        }
        const float top = work[id[0]];
        float total = 0.0f;
        for (int64_t k = 0; k < K; k++) {
            weight[k] = expf(work[id[k]] - top);
            total += weight[k];
        }
        if (!is_renormalized) {
            total = 0.0f;
            for (int64_t e = 0; e < E; e++) total += expf(work[e] - top);
        }
        for (int64_t k = 0; k < K; k++) weight[k] = weight[k] / total * scaling;
    }
    return nan_rows;
}

/* ---- experts -------------------------------------------------------------------------------- */

INLINE void tile(const float *const *rows, const float *w, int64_t K, int64_t stride, float *out,
                 int64_t N, const int num_rows, const int num_vecs) {
    vec acc[TILE_ROWS][TILE_VECS];
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < num_vecs; v++) acc[r][v] = splat(0.0f);
    for (int64_t k = 0; k < K; k++, w += stride) {
        vec column[TILE_VECS];
#pragma GCC unroll 8
        for (int v = 0; v < num_vecs; v++) column[v] = load(w + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < num_vecs; v++) acc[r][v] += column[v] * rows[r][k];
    }
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < num_vecs; v++) store(out + r * N + v * LANES, acc[r][v]);
}

INLINE void rows_times(const float *const *rows, const float *w, int64_t K, int64_t N, float *out,
                       const int num_rows) {
    if (N % BLOCK == 0)
        for (int64_t n = 0; n < N; n += TILE_VECS * LANES)
            tile(rows, w + n / BLOCK * BLOCK * K + n % BLOCK, K, BLOCK, out + n, N, num_rows,
                 TILE_VECS);
    else
        for (int64_t n = 0; n < N; n += LANES)
            tile(rows, w + n * K, K, LANES, out + n, N, num_rows, 1);
}

/* out [num_rows, N] = rows [num_rows, K] @ w [K, N]; N a multiple of LANES. w lies in blocks of
 * columns, [N / BLOCK, K, BLOCK], so that a tile reads its weights in one stream; blocks are LANES
 * wide where N is no multiple of BLOCK. */
static void product(const float *const *rows, int num_rows, const float *w, int64_t K, int64_t N,
                    float *out) {
    switch (num_rows) {
        case 1: rows_times(rows, w, K, N, out, 1); break;
        case 2: rows_times(rows, w, K, N, out, 2); break;
        case 3: rows_times(rows, w, K, N, out, 3); break;
#if TILE_ROWS > 3
        case 4: rows_times(rows, w, K, N, out, 4); break;
        case 5: rows_times(rows, w, K, N, out, 5); break;
        case 6: rows_times(rows, w, K, N, out, 6); break;
#endif
        default: break;
    }
}

typedef struct {
    int64_t T, H, I, E, K;
    const float *w13; /* [E, H, 2I] in blocks: columns of the gate, then of up */
    const float *w2;  /* [E, I, H] in blocks */
} Experts;

INLINE int is_here(int32_t id, int64_t E) { return id >= 0 && id < E; }

/* Floats in a row of a tile: gate and up, later the result. */
INLINE int64_t tile_width(int64_t H, int64_t I) { return H > 2 * I ? H : 2 * I; }

/* Bytes of scratch memory that `moeserve_experts` needs for T tokens. */
int64_t moeserve_experts_work(int64_t T, int64_t H, int64_t I, int64_t E, int64_t K) {
    return (T * K * H + TILE_ROWS * (tile_width(H, I) + I)) * 4 + (T * K + E + 1) * 4 + 64;
}

/* out [T, H] = sum over slots, in slot order, of weight * expert(x); an id outside of 0 to E - 1
 * is nobody's and adds nothing. */
void moeserve_experts(const Experts *p, const float *x, const int32_t *ids, const float *weights,
                      float *out, float *work) {
    const int64_t T = p->T, H = p->H, I = p->I, E = p->E, K = p->K, S = T * K;
    float *y = work, *h = y + S * H, *a = h + TILE_ROWS * tile_width(H, I);
    int32_t *order = (int32_t *)(a + TILE_ROWS * I), *ends = order + S;
    memset(ends, 0, (size_t)(E + 1) * sizeof(int32_t));
    for (int64_t s = 0; s < S; s++)
        if (is_here(ids[s], E)) ends[ids[s] + 1]++;
    for (int64_t e = 0; e < E; e++) ends[e + 1] += ends[e];
    /* Placing a slot moves its expert's start, which then is the next one's: its own end. */
    for (int64_t s = 0; s < S; s++)
        if (is_here(ids[s], E)) order[ends[ids[s]]++] = (int32_t)s;
    for (int64_t e = 0; e < E; e++) {
        const int32_t first = e ? ends[e - 1] : 0;
        for (int32_t at = first; at < ends[e]; at += TILE_ROWS) {
            const int n = ends[e] - at < TILE_ROWS ? ends[e] - at : TILE_ROWS;
            const float *rows[TILE_ROWS];
            for (int r = 0; r < n; r++) rows[r] = x + order[at + r] / K * H;
            product(rows, n, p->w13 + e * H * 2 * I, H, 2 * I, h);
            for (int r = 0; r < n; r++) {
                rows[r] = a + r * I;
                for (int64_t i = 0; i < I; i += LANES) {
                    const vec gate = load(h + r * 2 * I + i), up = load(h + r * 2 * I + I + i);
                    store(a + r * I + i, gate / (1.0f + exp_vec(-gate)) * up);
                }
            }
            /* The rows of this tile lie apart in y, so they are made in h and copied. */
            product(rows, n, p->w2 + e * I * H, I, H, h);
            for (int r = 0; r < n; r++)
                memcpy(y + order[at + r] * H, h + r * H, (size_t)H * sizeof(float));
        }
    }
    for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < H; i += LANES) {
            vec total = splat(0.0f);
            for (int64_t k = 0; k < K; k++)
                if (is_here(ids[t * K + k], E))
                    total += load(y + (t * K + k) * H + i) * weights[t * K + k];
            store(out + t * H + i, total);
        }
}

#include "attention.c"
