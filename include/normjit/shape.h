/* Axes and strides: validity, reach, overlap, collapse, layout. */

/* ---- descriptor ----------------------------------------------------------------------------- */

static int nji_is_normalized(const nj_desc *desc, int axis) {
    return (int)(desc->norm_axes >> axis & 1u);
}

/* Checks rank, shape and axes; rows and cols are the products of the two groups of extents. */
static nj_status nji_check_shape(const nj_desc *desc, int64_t *rows, int64_t *cols,
                                 const char *call) {
    int64_t all =
        1; /* product of the extents that are not 0: every partial product must fit, too */
    int axis;
    if (!desc)
        return nji_fail(NJ_INVALID_ARGUMENT, "%s: desc = NULL: a descriptor is required", call);
    if (desc->rank < 1 || desc->rank > NJ_MAX_RANK) {
        return nji_fail(NJ_INVALID_ARGUMENT, "%s: desc.rank = %d: a rank is 1 to %d", call,
                        (int)desc->rank, NJ_MAX_RANK);
    }
    if (desc->norm_axes == 0) {
        return nji_fail(NJ_INVALID_ARGUMENT,
                        "%s: desc.norm_axes = 0: at least one axis must be normalized", call);
    }
    if (desc->norm_axes >> desc->rank != 0) {
        return nji_fail(NJ_INVALID_ARGUMENT,
                        "%s: desc.norm_axes = 0x%x: rank %d has axes 0 to %d only", call,
                        (unsigned)desc->norm_axes, (int)desc->rank, (int)desc->rank - 1);
    }
    *rows = *cols = 1;
    for (axis = 0; axis < desc->rank; axis++) {
        int64_t extent = desc->shape[axis];
        int64_t *product = nji_is_normalized(desc, axis) ? cols : rows;
        if (extent < 0) {
            return nji_fail(NJ_INVALID_ARGUMENT,
                            "%s: desc.shape[%d] = %lld: an extent is 0 or more", call, axis,
                            (long long)extent);
        }
        if (extent != 0 && !nji_mul_i64(all, extent, &all)) {
            return nji_fail(NJ_INVALID_ARGUMENT,
                            "%s: desc.shape[%d] = %lld: the product of the extents overflows int64",
                            call, axis, (long long)extent);
        }
        *product *= extent;
    }
    if (all > INT64_MAX / 8) {
        return nji_fail(NJ_INVALID_ARGUMENT,
                        "%s: desc.shape: %lld elements: their bytes would overflow int64", call,
                        (long long)all);
    }
    return NJ_OK;
}

static int nji_is_forward(const nj_desc *desc) {
    return desc->op == NJ_OP_LAYER_NORM_FORWARD;
}

/* ---- views ---------------------------------------------------------------------------------- */

typedef enum nji_kind { NJI_FULL, NJI_STAT, NJI_PARAM } nji_kind;

/* One operand of a run, whichever tensor type it came in. */
typedef struct nji_view {
    const char *name; /* field of nj_args */
    void *data;
    const int64_t *shape, *stride;
    int64_t offset, count;
    int64_t low, high; /* lowest and highest element that the strides reach, from data */
    uintptr_t first_byte, last_byte; /* their addresses */
    int32_t rank;
    int32_t size; /* bytes of an element */
    nji_kind kind;
    int writable;
    int empty; /* no elements */
    nj_dtype dtype;
    size_t slot; /* where its nji_operand lies in nji_problem */
} nji_view;

/* Extents that the descriptor gives to an operand of a kind. */
static void nji_expected_shape(const nj_desc *desc, nji_kind kind, int32_t *rank,
                               int64_t shape[NJ_MAX_RANK]) {
    int axis;
    int32_t n = 0;
    for (axis = 0; axis < desc->rank; axis++) {
        int normalized = nji_is_normalized(desc, axis);
        if (kind == NJI_PARAM && !normalized) continue;
        shape[n++] = kind == NJI_STAT && normalized ? 1 : desc->shape[axis];
    }
    *rank = n;
}

typedef struct nji_views {
    nji_view view[10];
    int count;
    int packed; /* each view is known to be as nji_packed_args makes it */
    int guide;  /* the output of x's shape, else dy */
} nji_views;

#define NJI_VIEW(set, args, field, kind_of, type_of, is_written)                                   \
    do {                                                                                           \
        nji_view *added = &(set)->view[(set)->count++];                                            \
        added->name = #field;                                                                      \
        added->data = (void *)(uintptr_t)(args)->field.data;                                       \
        added->shape = (args)->field.shape;                                                        \
        added->stride = (args)->field.stride;                                                      \
        added->offset = (args)->field.offset;                                                      \
        added->count = (args)->field.count;                                                        \
        added->rank = (args)->field.rank;                                                          \
        added->kind = (kind_of);                                                                   \
        added->dtype = (type_of);                                                                  \
        added->size = (int32_t)nj_dtype_size(type_of);                                             \
        added->writable = (is_written);                                                            \
        added->empty = 0;                                                                          \
        added->slot = offsetof(nji_problem, field);                                                \
    } while (0)

/* Lists the operands that the descriptor uses; what it does not use is not looked at. */
static void nji_list_views(const nj_desc *desc, const nj_args *args, nji_views *set) {
    nj_dtype type = desc->dtype, param = desc->param_dtype, stat = desc->stat_dtype;
    set->count = set->packed = 0;
    if (nji_is_forward(desc)) {
        NJI_VIEW(set, args, y, NJI_FULL, type, 1);
        NJI_VIEW(set, args, x, NJI_FULL, type, 0);
        if (desc->has_gamma) NJI_VIEW(set, args, gamma, NJI_PARAM, param, 0);
        if (desc->has_beta) NJI_VIEW(set, args, beta, NJI_PARAM, param, 0);
        if (args->mean.data) NJI_VIEW(set, args, mean, NJI_STAT, stat, 1);
        if (args->rstd.data) NJI_VIEW(set, args, rstd, NJI_STAT, stat, 1);
    } else {
        if (desc->grads & NJ_GRAD_DX) NJI_VIEW(set, args, dx, NJI_FULL, type, 1);
        NJI_VIEW(set, args, dy, NJI_FULL, type, 0);
        if (desc->grads & (NJ_GRAD_DX | NJ_GRAD_DGAMMA)) {
            NJI_VIEW(set, args, x, NJI_FULL, type, 0);
            NJI_VIEW(set, args, mean, NJI_STAT, stat, 0);
            NJI_VIEW(set, args, rstd, NJI_STAT, stat, 0);
        }
        if (desc->has_gamma && (desc->grads & NJ_GRAD_DX)) {
            NJI_VIEW(set, args, gamma, NJI_PARAM, param, 0);
        }
        if (desc->grads & NJ_GRAD_DGAMMA) NJI_VIEW(set, args, dgamma, NJI_PARAM, param, 1);
        if (desc->grads & NJ_GRAD_DBETA) NJI_VIEW(set, args, dbeta, NJI_PARAM, param, 1);
    }
    set->guide = 0;
}

/* Every operand packed at one address, for problems that are made up. */
static void nji_packed_args(const nj_desc *desc, void *address, nj_args *args) {
    int64_t stat[NJ_MAX_RANK], param[NJ_MAX_RANK];
    int32_t stat_rank, param_rank;
    nji_expected_shape(desc, NJI_STAT, &stat_rank, stat);
    nji_expected_shape(desc, NJI_PARAM, &param_rank, param);
    args->x = args->dy = nj_packed_const(address, desc->rank, desc->shape);
    args->y = args->dx = nj_packed(address, desc->rank, desc->shape);
    args->gamma = args->beta = nj_packed_const(address, param_rank, param);
    args->dgamma = args->dbeta = nj_packed(address, param_rank, param);
    args->mean = args->rstd = nj_packed(address, stat_rank, stat);
}

static nj_status nji_missing_operand(const nji_view *view, const char *call) {
    return nji_fail(NJ_INVALID_ARGUMENT, "%s: args.%s.data = NULL: this plan needs the operand",
                    call, view->name);
}

static nj_status nji_check_view_shape(const nj_desc *desc, nji_view *view, const char *call) {
    int64_t own[NJ_MAX_RANK];
    const int64_t *expected = desc->shape;
    int32_t rank = desc->rank, axis;
    if (view->kind != NJI_FULL) {
        nji_expected_shape(desc, view->kind, &rank, own);
        expected = own;
    }
    if (view->rank == 0 && !view->data) return nji_missing_operand(view, call);
    if (view->rank != rank) {
        return nji_fail(NJ_INVALID_ARGUMENT, "%s: args.%s.rank = %d: this operand has rank %d",
                        call, view->name, (int)view->rank, (int)rank);
    }
    view->empty = 0;
    for (axis = 0; axis < rank; axis++) {
        if (view->shape[axis] != expected[axis]) {
            return nji_fail(NJ_INVALID_ARGUMENT,
                            "%s: args.%s.shape[%d] = %lld: the plan wants %lld", call, view->name,
                            (int)axis, (long long)view->shape[axis], (long long)expected[axis]);
        }
        if (expected[axis] == 0) view->empty = 1;
    }
    return NJ_OK;
}

/* Past any address, and so that the bytes of two views, of 8 for an element, add up in int64. */
#define NJI_MAX_ELEMENT (INT64_MAX / 32)

static void nji_set_reach(nji_view *view, int64_t low, int64_t high) {
    view->low = low;
    view->high = high;
    view->first_byte = (uintptr_t)view->data + (uintptr_t)low * (uintptr_t)view->size;
    view->last_byte = (uintptr_t)view->data + ((uintptr_t)high + 1) * (uintptr_t)view->size - 1;
}

/* Sets what is reached; outputs must walk forward. */
static nj_status nji_check_view_reach(nji_view *view, const char *call) {
    int64_t low = view->offset, high = view->offset;
    int axis;
    for (axis = 0; axis < view->rank; axis++) {
        int64_t stride = view->stride[axis], span;
        if (view->shape[axis] == 1) continue;
        if (view->writable && stride <= 0) {
            return nji_fail(NJ_INVALID_ARGUMENT,
                            "%s: args.%s.stride[%d] = %lld: an output's stride must be positive",
                            call, view->name, axis, (long long)stride);
        }
        if (!nji_mul_i64(view->shape[axis] - 1, stride, &span) ||
            !nji_add_i64(span < 0 ? low : high, span, span < 0 ? &low : &high)) {
            return nji_fail(
                NJ_INVALID_ARGUMENT,
                "%s: args.%s.stride[%d] = %lld: the reach of the strides overflows int64", call,
                view->name, axis, (long long)stride);
        }
    }
    if (low < 0) {
        return nji_fail(
            NJ_INVALID_ARGUMENT,
            "%s: args.%s: offset and strides reach element %lld: the buffer starts at 0", call,
            view->name, (long long)low);
    }
    if (high > NJI_MAX_ELEMENT) {
        return nji_fail(
            NJ_INVALID_ARGUMENT,
            "%s: args.%s: offset and strides reach element %lld: no address is that high", call,
            view->name, (long long)high);
    }
    if (view->count != 0 && high >= view->count) {
        return nji_fail_sized(NJ_BUFFER_TOO_SMALL, (uint64_t)high + 1, (uint64_t)view->count,
                              "%s: args.%s.count = %lld: offset and strides need %lld elements",
                              call, view->name, (long long)view->count, (long long)high + 1);
    }
    nji_set_reach(view, low, high);
    return NJ_OK;
}

/* Axes taken by growing stride must each step past everything the smaller ones reach: enough for no
   element to come twice, and more than strictly needed; other interleavings are refused as well. */
static nj_status nji_check_output_is_injective(const nji_view *view, const char *call) {
    int64_t reach = 0;
    unsigned done = 0;
    for (;;) {
        int axis, best = -1;
        for (axis = 0; axis < view->rank; axis++) {
            if (view->shape[axis] == 1 || done >> axis & 1u) continue;
            if (best < 0 || view->stride[axis] < view->stride[best]) best = axis;
        }
        if (best < 0) return NJ_OK;
        if (view->stride[best] <= reach) {
            return nji_fail(
                NJ_INVALID_ARGUMENT,
                "%s: args.%s.stride[%d] = %lld: the smaller strides reach %lld elements: an "
                "output's stride must step past them",
                call, view->name, best, (long long)view->stride[best], (long long)reach + 1);
        }
        reach += (view->shape[best] - 1) * view->stride[best];
        done |= 1u << best;
    }
}

/* Sizes are powers of two. */
static int nji_is_element_address(const nji_view *view) {
    return ((uintptr_t)view->data & (uintptr_t)(view->size - 1)) == 0;
}

/* Everything about one operand that does not involve another. */
static nj_status nji_check_view(const nj_desc *desc, nji_view *view, const char *call) {
    nj_status status = nji_check_view_shape(desc, view, call);
    if (status != NJ_OK) return status;
    if (view->count < 0) {
        return nji_fail(NJ_INVALID_ARGUMENT,
                        "%s: args.%s.count = %lld: a count is 0 (not known) or more", call,
                        view->name, (long long)view->count);
    }
    if (view->offset < 0) {
        return nji_fail(NJ_INVALID_ARGUMENT, "%s: args.%s.offset = %lld: an offset is 0 or more",
                        call, view->name, (long long)view->offset);
    }
    if (view->empty) return NJ_OK;
    if (!view->data) return nji_missing_operand(view, call);
    if (!nji_is_element_address(view)) {
        return nji_fail(NJ_MISALIGNED_OPERAND,
                        "%s: args.%s.data = %p: must be a multiple of the element size %d", call,
                        view->name, view->data, (int)view->size);
    }
    status = nji_check_view_reach(view, call);
    if (status != NJ_OK) return status;
    return view->writable ? nji_check_output_is_injective(view, call) : NJ_OK;
}

/* The usual operand, at a glance: 1 when it lies as `packed`, the packed tensor of its kind, and is
   sound; then it sets what nji_check_view sets. 0: that must look closer. */
static int nji_is_packed_view(nji_view *view, const nj_tensor *packed) {
    const int64_t count = packed->count;
    int64_t differs = 0;
    int axis;
    if (view->rank != packed->rank) return 0;
    for (axis = 0; axis < packed->rank; axis++) {
        differs |= view->shape[axis] ^ packed->shape[axis];
        differs |= view->stride[axis] ^ packed->stride[axis];
    }
    if (differs || count == 0 || !view->data || !nji_is_element_address(view) || view->offset < 0 ||
        view->offset > NJI_MAX_ELEMENT - count ||
        (view->count != 0 && view->count < view->offset + count)) {
        return 0;
    }
    view->empty = 0;
    nji_set_reach(view, view->offset, view->offset + count - 1);
    return 1;
}

/* ---- overlap -------------------------------------------------------------------------------- */

/* Terms c*z with 0 <= z <= bound; coefficients distinct, descending. */
typedef struct nji_terms {
    int64_t coefficient[2 * NJ_MAX_RANK + 2], bound[2 * NJ_MAX_RANK + 2];
    int count;
} nji_terms;

static void nji_add_term(nji_terms *terms, int64_t coefficient, int64_t bound) {
    int i, at = 0;
    if (coefficient == 0 || bound == 0) return;
    while (at < terms->count && terms->coefficient[at] > coefficient) at++;
    if (at < terms->count && terms->coefficient[at] == coefficient) {
        terms->bound[at] += bound;
        return;
    }
    for (i = terms->count; i > at; i--) {
        terms->coefficient[i] = terms->coefficient[i - 1];
        terms->bound[i] = terms->bound[i - 1];
    }
    terms->coefficient[at] = coefficient;
    terms->bound[at] = bound;
    terms->count++;
}

/* Whether the terms from `first` on can sum to target. 0 no, 1 yes; gives up (0) when the budget of
   steps is spent: an overlap must be proven. */
static int nji_can_sum(const nji_terms *terms, int first, int64_t target, int *budget) {
    int64_t rest = 0, coefficient, from, to, z;
    int i;
    if (target < 0) return 0;
    if (first == terms->count) return target == 0;
    if (--*budget < 0) return 0;
    coefficient = terms->coefficient[first];
    for (i = first + 1; i < terms->count; i++) rest += terms->coefficient[i] * terms->bound[i];
    from = target > rest ? nji_ceil_div(target - rest, coefficient) : 0;
    to = nji_min_i64(target / coefficient, terms->bound[first]);
    for (z = from; z <= to && *budget >= 0; z++) {
        if (nji_can_sum(terms, first + 1, target - z * coefficient, budget)) return 1;
    }
    return 0;
}

static void nji_add_view_terms(nji_terms *terms, const nji_view *view) {
    int axis;
    for (axis = 0; axis < view->rank; axis++) {
        int64_t stride = view->stride[axis];
        if (view->shape[axis] == 1) continue; /* whose stride may be anything */
        nji_add_term(terms, (stride < 0 ? -stride : stride) * view->size, view->shape[axis] - 1);
    }
    nji_add_term(terms, 1, view->size - 1);
}

/* Whether one lies wholly below the other: the common case, and a quick answer. */
static int nji_views_are_apart(const nji_view *a, const nji_view *b) {
    return a->last_byte < b->first_byte || b->last_byte < a->first_byte;
}

/* Of views that are not apart: 1 when some byte is proven to belong to both. The addresses of a
   meet those of b where a0 + sum(sa*i) = b0 + sum(sb*j); counting b's indices from its far end
   makes every term positive, and whether they can sum to the distance is a small bounded search. */
static int nji_views_overlap(const nji_view *a, const nji_view *b) {
    nji_terms terms;
    int budget = 4096;
    terms.count = 0;
    nji_add_view_terms(&terms, a);
    nji_add_view_terms(&terms, b);
    return nji_can_sum(&terms, 0, (int64_t)(b->last_byte - a->first_byte), &budget);
}

/* The same elements in the same order. */
static int nji_views_equal(const nji_view *a, const nji_view *b) {
    int axis;
    if (a->kind != b->kind || a->dtype != b->dtype || a->data != b->data ||
        a->offset != b->offset) {
        return 0;
    }
    for (axis = 0; axis < a->rank; axis++) {
        if (a->shape[axis] != 1 && a->stride[axis] != b->stride[axis]) return 0;
    }
    return 1;
}

/* Outputs may not meet any other operand, but for an input of x's shape that they replace. */
static nj_status nji_check_overlaps(const nji_view *views, int count, const char *call) {
    int i, j;
    for (i = 0; i < count; i++) {
        const nji_view *out = &views[i];
        if (!out->writable || out->empty) continue;
        for (j = 0; j < count; j++) {
            const nji_view *other = &views[j];
            if (j == i || other->empty || nji_views_are_apart(out, other)) continue;
            if (other->writable && j < i) continue;
            if (!other->writable && out->kind == NJI_FULL && nji_views_equal(out, other)) continue;
            if (!nji_views_overlap(out, other)) continue;
            return nji_fail(
                NJ_INVALID_ARGUMENT,
                "%s: args.%s overlaps args.%s: an output must be apart from every other "
                "operand, or the same view as an input of x's shape",
                call, out->name, other->name);
        }
    }
    return NJ_OK;
}

/* ---- collapse ------------------------------------------------------------------------------- */

/* An axis of the problem with the stride of each view. */
typedef struct nji_axis {
    int64_t extent;
    int64_t stride[10];
} nji_axis;

/* A view's stride along one of x's axes; 0 when it does not vary there. */
static int64_t nji_stride_along(const nji_view *view, int axis, int param_axis, int is_col) {
    if (view->empty) return 0; /* its strides are not checked and may be anything */
    switch (view->kind) {
    case NJI_STAT: return is_col ? 0 : view->stride[axis];
    case NJI_PARAM: return is_col ? view->stride[param_axis] : 0;
    default: return view->stride[axis];
    }
}

/* Gathers the axes of one group whose extent is not 1. */
static int nji_gather_axes(const nj_desc *desc, const nji_view *views, int count, int normalized,
                           nji_axis axes[NJ_MAX_RANK]) {
    int axis, n = 0, param_axis = 0, i;
    for (axis = 0; axis < desc->rank; axis++) {
        int is_col = nji_is_normalized(desc, axis);
        if (is_col == normalized && desc->shape[axis] != 1) {
            axes[n].extent = desc->shape[axis];
            for (i = 0; i < count; i++) {
                axes[n].stride[i] = nji_stride_along(&views[i], axis, param_axis, is_col);
            }
            n++;
        }
        param_axis += is_col;
    }
    return n;
}

/* Orders axes by the guide's falling stride and joins neighbours that every view walks as one. The
   order within a group is free: rows are independent, and columns meet their gamma by stride. */
static int nji_merge_axes(nji_axis *axes, int n, int count, int guide) {
    int i, j, k, merged = 0;
    for (i = 1; i < n; i++) {
        nji_axis moving;
        if (axes[i - 1].stride[guide] >= axes[i].stride[guide]) continue;
        moving = axes[i];
        for (j = i; j > 0 && axes[j - 1].stride[guide] < moving.stride[guide]; j--) {
            axes[j] = axes[j - 1];
        }
        axes[j] = moving;
    }
    for (i = 0; i < n; i++) {
        int joins = merged > 0;
        for (k = 0; joins && k < count; k++) {
            joins = axes[merged - 1].stride[k] == axes[i].stride[k] * axes[i].extent;
        }
        if (joins) {
            int64_t outer = axes[merged - 1].extent;
            axes[merged - 1] = axes[i];
            axes[merged - 1].extent *= outer;
        } else {
            axes[merged++] = axes[i];
        }
    }
    return merged;
}

static void *nji_first_element(const nji_view *view) {
    if (view->empty || !view->data) return NULL;
    return (char *)view->data + view->offset * view->size;
}

static nji_operand *nji_operand_of(nji_problem *problem, const nji_view *view) {
    return (nji_operand *)(void *)((char *)problem + view->slot);
}

/* Fills extents, dims and operands of the problem from checked views. views[guide] is the tensor of
   x's shape whose memory order matters most: the output. */
static void nji_collapse(const nj_desc *desc, const nji_view *views, int count, int guide,
                         nji_problem *problem) {
    nji_axis axes[2 * NJ_MAX_RANK];
    int row_dims, col_dims, i, d;
    row_dims = nji_merge_axes(axes, nji_gather_axes(desc, views, count, 0, axes), count, guide);
    col_dims = nji_gather_axes(desc, views, count, 1, axes + row_dims);
    col_dims = nji_merge_axes(axes + row_dims, col_dims, count, guide);
    problem->row_dims = row_dims;
    problem->col_dims = col_dims;
    for (d = 0; d < row_dims + col_dims; d++) problem->extent[d] = axes[d].extent;
    for (i = 0; i < count; i++) {
        nji_operand *operand = nji_operand_of(problem, &views[i]);
        operand->data = nji_first_element(&views[i]);
        for (d = 0; d < row_dims + col_dims; d++) operand->stride[d] = axes[d].stride[i];
    }
}

/* Checked views -> what a backend computes. */
static void nji_bind(const nj_desc *desc, int64_t rows, int64_t cols, const nji_views *set,
                     nji_problem *problem) {
    memset(problem, 0, sizeof *problem);
    problem->rows = rows;
    problem->cols = cols;
    problem->eps = desc->eps;
    problem->param_dtype = (int)desc->param_dtype;
    problem->stat_dtype = (int)desc->stat_dtype;
    problem->grads = desc->grads;
    problem->accumulate = desc->accumulate;
    nji_collapse(desc, set->view, set->count, set->guide, problem);
}

/* ---- layout --------------------------------------------------------------------------------- */

/* An absent operand has any layout, and so has one column. */
static int nji_has_unit_columns(const nji_problem *problem, const nji_operand *operand) {
    if (!operand->data || problem->col_dims == 0) return 1;
    return problem->col_dims == 1 && operand->stride[problem->row_dims] == 1;
}

static int nji_has_packed_rows(const nji_problem *problem, const nji_operand *operand) {
    if (!operand->data || problem->row_dims == 0) return 1;
    return problem->row_dims == 1 && operand->stride[0] == problem->cols;
}

static nj_layout nji_layout_of(const nji_problem *p) {
    if (nji_has_unit_columns(p, &p->x) && nji_has_unit_columns(p, &p->dy) &&
        nji_has_unit_columns(p, &p->y) && nji_has_unit_columns(p, &p->dx) &&
        nji_has_unit_columns(p, &p->gamma) && nji_has_unit_columns(p, &p->beta) &&
        nji_has_unit_columns(p, &p->dgamma) && nji_has_unit_columns(p, &p->dbeta)) {
        return nji_has_packed_rows(p, &p->x) && nji_has_packed_rows(p, &p->dy) &&
                       nji_has_packed_rows(p, &p->y) && nji_has_packed_rows(p, &p->dx)
                   ? NJ_LAYOUT_PACKED
                   : NJ_LAYOUT_PADDED_ROWS;
    }
    {
        /* The output as far as there is one: dy is often one value, broadcast. */
        const nji_operand *walked = p->y.data ? &p->y : p->dx.data ? &p->dx : &p->dy;
        return p->row_dims > 0 && walked->stride[p->row_dims - 1] == 1 ? NJ_LAYOUT_CHANNELS_FIRST
                                                                       : NJ_LAYOUT_STRIDED;
    }
}
