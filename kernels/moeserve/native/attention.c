/* Paged attention of one layer for CPUs; included by kernels.c, whose vector types it uses.
 *
 * Cache [num_kv_heads, num_pages, 2, D * PAGE]: a page holds its keys as [D, PAGE], so that the
 * scores of a whole page come out of one pass without sums across lanes, then its values as
 * [PAGE, D]. D is a multiple of LANES. Softmax is accumulated page by page.
 */

typedef struct {
    int64_t num_heads, num_kv_heads, D, num_pages;
    float eps, scale;
    const float *norm; /* [num_heads + num_kv_heads, D], or NULL */
} Shape;

typedef struct {
    int64_t num_tokens, num_seqs, num_decodes;
    int64_t num_shared; /* leading pages that all decoding sequences have in common */
    int64_t table_stride;
    const int64_t *slots;   /* [T] */
    const int64_t *starts;  /* [B + 1] first row of each sequence */
    const int64_t *lengths; /* [B] tokens once the step has run */
    const int32_t *table;   /* [B, table_stride] */
} Step;

/* Running softmax of one query: its maximum, its sum by lane, its weighted values [D]. */
typedef struct {
    float most;
    float unused[LANES - 1]; /* so that vectors begin at cache lines */
    vec total;
    float out[];
} State;

INLINE State *state_at(char *base, int64_t i, int64_t D) {
    return (State *)(base + (size_t)i * (sizeof(State) + (size_t)D * sizeof(float)));
}

static void reset(State *s, int64_t D) {
    s->most = -INFINITY;
    s->total = splat(0.0f);
    memset(s->out, 0, (size_t)D * sizeof(float));
}

/* One page for n queries; query i sees its first seen[i] tokens, at least one. */
INLINE void page_for(const float *page, int64_t D, float scale, const float *const *q,
                     State *const *states, const int64_t *seen, const int n) {
    const float *values = page + D * PAGE;
    /* Two sums each, over even and odd d: one alone waits for its own last addition. */
    vec scores[BLOCK_QUERIES], odd[BLOCK_QUERIES];
    float probs[BLOCK_QUERIES][PAGE];
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) scores[i] = odd[i] = splat(0.0f);
    for (int64_t d = 0; d < D; d += 2) {
        const vec keys = load(page + d * PAGE), next = load(page + (d + 1) * PAGE);
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) {
            scores[i] += keys * q[i][d];
            odd[i] += next * q[i][d + 1];
        }
    }
    for (int i = 0; i < n; i++) {
        State *s = states[i];
        vec score = (scores[i] + odd[i]) * scale;
        if (seen[i] < PAGE)
            for (int64_t t = seen[i]; t < PAGE; t++) score[t] = -INFINITY;
        const float most = largest(score);
        if (most > s->most) {
            const float shrink = s->most == -INFINITY ? 0.0f : expf(s->most - most);
            s->total *= shrink;
            for (int64_t d = 0; d < D; d += LANES) store(s->out + d, load(s->out + d) * shrink);
            s->most = most;
        }
        const vec p = exp_vec(score - s->most);
        s->total += p;
        store(probs[i], p);
    }
    for (int64_t d = 0; d < D; d += LANES) {
        vec out[BLOCK_QUERIES];
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) out[i] = load(states[i]->out + d);
        for (int t = 0; t < PAGE; t++) {
            const vec value = load(values + t * D + d);
#pragma GCC unroll 8
            for (int i = 0; i < n; i++) out[i] += value * probs[i][t];
        }
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) store(states[i]->out + d, out[i]);
    }
}

INLINE void fetch_ahead(const float *from, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) __builtin_prefetch(from + i);
}

static void page_for_some(const float *page, int64_t D, float scale, const float *const *q,
                          State *const *states, const int64_t *seen, int n) {
    switch (n) {
        case 1: page_for(page, D, scale, q, states, seen, 1); break;
        case 2: page_for(page, D, scale, q, states, seen, 2); break;
        case 4: page_for(page, D, scale, q, states, seen, 4); break;
        case 8: page_for(page, D, scale, q, states, seen, 8); break;
        default:
            for (int done = 0; done < n;) {
                const int part = n - done >= 4 ? 4 : n - done >= 2 ? 2 : 1;
                page_for_some(page, D, scale, q + done, states + done, seen + done, part);
                done += part;
            }
    }
}

/* Norm and rotation of queries and keys in place; keys and values into the cache. */
static void prepare(float *qkv, const float *cosine, const float *sine, const Step *step,
                    const Shape *shape, float *cache) {
    const int64_t D = shape->D, half = D / 2, heads = shape->num_heads;
    const int64_t kv_heads = shape->num_kv_heads, width = (heads + 2 * kv_heads) * D;
    for (int64_t t = 0; t < step->num_tokens; t++) {
        const float *c = cosine + t * D, *s = sine + t * half;
        for (int64_t h = 0; h < heads + kv_heads; h++) {
            float *x = qkv + t * width + h * D;
            if (shape->norm) {
                vec squares = splat(0.0f);
                for (int64_t d = 0; d < D; d += LANES) squares += load(x + d) * load(x + d);
                const float scale = 1.0f / sqrtf(sum(squares) / (float)D + shape->eps);
                for (int64_t d = 0; d < D; d += LANES)
                    store(x + d, load(x + d) * scale * load(shape->norm + h * D + d));
            }
            for (int64_t d = 0; d < half; d++) {
                const float a = x[d], b = x[d + half];
                x[d] = a * c[d] - b * s[d];
                x[d + half] = b * c[d] + a * s[d];
            }
        }
        const int64_t page = step->slots[t] / PAGE, place = step->slots[t] % PAGE;
        for (int64_t h = 0; h < kv_heads; h++) {
            float *into = cache + (h * shape->num_pages + page) * 2 * D * PAGE;
            const float *key = qkv + t * width + (heads + h) * D, *value = key + kv_heads * D;
            for (int64_t d = 0; d < D; d++) into[d * PAGE + place] = key[d];
            memcpy(into + D * PAGE + place * D, value, (size_t)D * sizeof(float));
        }
    }
}

/* Rows of one sequence against its pages from `first` on; states of its queries lie in a row. */
static void sequence(const float *qkv, const Step *step, const Shape *shape, const float *pages,
                     int64_t b, int64_t head, int64_t first, char *states) {
    const int64_t D = shape->D, group = shape->num_heads / shape->num_kv_heads;
    const int64_t width = (shape->num_heads + 2 * shape->num_kv_heads) * D;
    const int64_t start = step->starts[b], count = step->starts[b + 1] - start;
    const int64_t before = step->lengths[b] - count;
    const int32_t *table = step->table + b * step->table_stride;
    const int64_t num_queries = count * group;
    for (int64_t done = 0; done < num_queries; done += BLOCK_QUERIES) {
        const int n = num_queries - done < BLOCK_QUERIES ? (int)(num_queries - done) : BLOCK_QUERIES;
        const float *q[BLOCK_QUERIES];
        State *own[BLOCK_QUERIES];
        int64_t limit[BLOCK_QUERIES], seen[BLOCK_QUERIES];
        for (int i = 0; i < n; i++) {
            const int64_t row = (done + i) / group, g = (done + i) % group;
            q[i] = qkv + (start + row) * width + (head * group + g) * D;
            own[i] = state_at(states, done + i, D);
            limit[i] = before + row + 1;
        }
        /* Rows come in order: the last query of the block sees most, the first one least. */
        for (int64_t p = first; p * PAGE < limit[n - 1]; p++) {
            int skip = 0;
            /* Pages lie anywhere, so the processor does not foresee the next one. */
            if ((p + 1) * PAGE < limit[n - 1])
                fetch_ahead(pages + (int64_t)table[p + 1] * 2 * D * PAGE, 2 * D * PAGE);
            for (int i = 0; i < n; i++) {
                seen[i] = limit[i] - p * PAGE;
                if (seen[i] <= 0) skip = i + 1;
            }
            page_for_some(pages + (int64_t)table[p] * 2 * D * PAGE, D, shape->scale, q + skip,
                          own + skip, seen + skip, n - skip);
        }
    }
}

/* The pages that all decoding sequences share, each read once for all of them. */
static void shared_pages(const float *qkv, const Step *step, const Shape *shape,
                         const float *pages, int64_t head, char *states) {
    const int64_t D = shape->D, group = shape->num_heads / shape->num_kv_heads;
    const int64_t width = (shape->num_heads + 2 * shape->num_kv_heads) * D;
    const int64_t num_queries = step->num_decodes * group;
    for (int64_t done = 0; done < num_queries; done += BLOCK_QUERIES) {
        const int n = num_queries - done < BLOCK_QUERIES ? (int)(num_queries - done) : BLOCK_QUERIES;
        const float *q[BLOCK_QUERIES];
        State *own[BLOCK_QUERIES];
        int64_t seen[BLOCK_QUERIES];
        for (int i = 0; i < n; i++) {
            q[i] = qkv + (done + i) / group * width + (head * group + (done + i) % group) * D;
            own[i] = state_at(states, done + i, D);
            seen[i] = PAGE;
        }
        for (int64_t p = 0; p < step->num_shared; p++)
            page_for_some(pages + (int64_t)step->table[p] * 2 * D * PAGE, D, shape->scale, q, own,
                          seen, n);
    }
}

/* qkv [T, (num_heads + 2 num_kv_heads) D], changed; cosine [T, D], sine [T, D / 2];
 * out [T, num_heads D]. Returns 0, or 1 where memory is lacking. */
int moeserve_attend(float *qkv, const float *cosine, const float *sine, const Step *step,
                    const Shape *shape, float *cache, float *out) {
    const int64_t D = shape->D, group = shape->num_heads / shape->num_kv_heads;
    int64_t most = step->num_decodes;
    for (int64_t b = step->num_decodes; b < step->num_seqs; b++)
        if (step->starts[b + 1] - step->starts[b] > most)
            most = step->starts[b + 1] - step->starts[b];
    const size_t state_bytes = sizeof(State) + (size_t)D * sizeof(float);
    char *states = aligned_alloc(64, (size_t)(most * group) * state_bytes);
    if (!states) return 1;
    prepare(qkv, cosine, sine, step, shape, cache);
    for (int64_t head = 0; head < shape->num_kv_heads; head++) {
        const float *pages = cache + head * shape->num_pages * 2 * D * PAGE;
        for (int64_t i = 0; i < step->num_decodes * group; i++) reset(state_at(states, i, D), D);
        if (step->num_shared) shared_pages(qkv, step, shape, pages, head, states);
        for (int64_t b = 0; b < step->num_seqs; b++) {
            const int64_t start = step->starts[b], count = step->starts[b + 1] - start;
            const int is_decode = b < step->num_decodes;
            char *own = is_decode ? (char *)state_at(states, b * group, D) : states;
            if (!is_decode)
                for (int64_t i = 0; i < count * group; i++) reset(state_at(own, i, D), D);
            sequence(qkv, step, shape, pages, b, head, is_decode ? step->num_shared : 0, own);
            for (int64_t i = 0; i < count * group; i++) {
                const State *s = state_at(own, i, D);
                const float scale = 1.0f / sum(s->total);
                float *row = out + (start + i / group) * shape->num_heads * D
                             + (head * group + i % group) * D;
                for (int64_t d = 0; d < D; d += LANES) store(row + d, load(s->out + d) * scale);
            }
        }
    }
    free(states);
    return 0;
}
