/* Every kernel that a plan could ask for, through the real NVRTC, for every architecture that it
   knows: compiles without a word, and the hot ones keep all in registers. Needs no GPU; skipped
   where there is no NVRTC. Options come from the functions that select uses. */
#define _POSIX_C_SOURCE 200809L /* popen */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define NORMJIT_IMPLEMENTATION
#include "normjit.h"

#define COUNT_OF(array) (sizeof(array) / sizeof(array)[0])

static nji_jit jit;
static int archs[64], arch_count;

static int open_nvrtc(void **state) {
    nj_ctx_desc desc;
    (void)state;
    memset(&desc, 0, sizeof desc);
    assert_int_equal(nji_jit_open(&jit, &desc, "test"), NJ_OK);
    if (!jit.has_nvrtc) return 0;
    assert_int_equal(jit.nvrtc.nvrtcGetNumSupportedArchs(&arch_count), 0);
    assert_in_range(arch_count, 1, COUNT_OF(archs));
    assert_int_equal(jit.nvrtc.nvrtcGetSupportedArchs(archs), 0);
    print_message("NVRTC %d.%d knows %d architectures\n", jit.nvrtc.major, jit.nvrtc.minor,
                  arch_count);
    return 0;
}

/* Of the rows kernels, compiled here. */
static int programs, programs_with_stack, programs_over_budget;

static int close_nvrtc(void **state) {
    (void)state;
    print_message("%d of %d rows programs use local memory\n", programs_with_stack, programs);
    nji_jit_close(&jit);
    return 0;
}

static void begin(void) {
    programs_over_budget = 0;
    if (jit.has_nvrtc) return;
    print_message("skipped: no NVRTC is installed\n");
    skip();
}

/* ---- compiling ------------------------------------------------------------------------------ */

/* What the assembler says of a program's kernels, added up. */
typedef struct kernel_report {
    int kernels;
    long stack, stores, loads; /* bytes: frames, spill stores, spill loads */
} kernel_report;

/* Reads "N bytes stack frame, N bytes spill stores, N bytes spill loads"; every other line must be
   one of the assembler's notes. */
static void read_log(char *log, const char *what, kernel_report *report) {
    char *line = strtok(log, "\n");
    memset(report, 0, sizeof *report);
    for (; line; line = strtok(NULL, "\n")) {
        long stack, stores, loads;
        const char *numbers = line + strcspn(line, "0123456789");
        if (sscanf(numbers, "%ld bytes stack frame, %ld bytes spill stores, %ld bytes spill loads",
                   &stack, &stores, &loads) == 3) {
            report->stack += stack;
            report->stores += stores;
            report->loads += loads;
        } else if (strstr(line, "Compiling entry function")) {
            report->kernels++;
        } else if (strncmp(line, "ptxas info", 10) != 0) {
            fail_msg("%s: the compiler says: %s", what, line);
        }
    }
}

/* Compiles a request as nji_jit_image does, but asks the assembler to report. */
static void compile(nji_jit_request *request, nji_options *options, const char *what,
                    kernel_report *report) {
    nji_jit_target target;
    nji_nvrtc_program program = NULL;
    const char **all;
    char *source, *log;
    size_t size;
    int count, result;
    nji_add_option(options, "--ptxas-options=-v");
    request->options = options->list;
    request->option_count = options->count;
    assert_int_equal(nji_jit_target_choose(&jit, request, &target, "test"), NJ_OK);
    assert_int_equal(nji_jit_join(request->lines, &source, &size, "test"), NJ_OK);
    assert_int_equal(nji_jit_options_make(request, &target, &all, &count, "test"), NJ_OK);
    result = jit.nvrtc.nvrtcCreateProgram(&program, source, request->name, 0, NULL, NULL);
    assert_int_equal(result, 0);
    result = jit.nvrtc.nvrtcCompileProgram(program, count, all);
    log = nji_jit_log_text(&jit.nvrtc, program);
    if (result != 0) fail_msg("%s for %s: %s", what, target.name, log ? log : "no log");
    assert_non_null(log);
    read_log(log, what, report);
    jit.nvrtc.nvrtcDestroyProgram(&program);
    NJ_FREE(log);
    NJ_FREE((void *)all);
    NJ_FREE(source);
}

/* Bytes of local memory that a thread of the rows kernels may use, spills included: none where it
   covers the columns exactly. Some registers' worth where a bound must be checked for each access
   or a stride added, or where the assembler of sm_120 deals with the same geometry; more in the
   longest rows of a cluster, and in tiles of doubles. */
static long most_stack(int arch, const nj_desc *desc, int64_t cols, const nji_choice *choice) {
    int64_t covered = (int64_t)choice->slices * choice->lanes * choice->chunks * choice->vec;
    if (choice->cluster) return choice->family == NJI_RING ? 32 : 160;
    if (choice->family == NJI_TILES && desc->dtype == NJ_F64) return 80;
    return covered == cols && arch < 120 && !choice->loose ? 0 : 32;
}

/* The strided kernels wait for memory, not for a register more. */
#define MOST_STRIDED_STACK 16

static void compile_fast(const nj_desc *desc, int64_t cols, const nji_choice *choice, int arch,
                         kernel_report *report) {
    static const char *const op[] = {"?", "forward", "backward"};
    const nji_fast_program *program = nji_fast_program_of(choice);
    nji_jit_request request;
    nji_options options;
    char what[160];
    memset(&request, 0, sizeof request);
    request.name = program->name;
    request.lines = program->lines;
    request.source_hash = program->hash;
    request.arch = arch;
    snprintf(what, sizeof what, "%ssm_%d %s dtype %d params %d cols %lld grads %u vec %d",
             choice->loose ? "loose " : "", arch,
             op[desc->op], (int)desc->dtype, (int)desc->param_dtype, (long long)cols,
             (unsigned)desc->grads, choice->vec);
    nji_fast_options(desc, cols, choice, &options);
    compile(&request, &options, what, report);
    assert_int_equal(report->kernels, choice->family == NJI_SPLIT ? 2 : 1);
    programs++;
    programs_with_stack += report->stack > 0;
    if (report->stack > most_stack(arch, desc, cols, choice)) {
        print_error("%s: %ld bytes of stack, %ld of spill stores, %ld of spill loads\n", what,
                    report->stack, report->stores, report->loads);
        programs_over_budget++;
    }
}

/* A checked descriptor of one row of cols columns. */
static nj_desc desc_of(nj_op op, nj_dtype dtype, nj_dtype param_dtype, int64_t cols,
                       uint32_t grads) {
    int64_t rows, product;
    nj_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.op = op;
    desc.dtype = dtype;
    desc.param_dtype = param_dtype;
    desc.rank = 2;
    desc.shape[0] = 100000;
    desc.shape[1] = cols;
    desc.norm_axes = 2;
    desc.has_gamma = desc.has_beta = 1;
    desc.grads = grads;
    assert_int_equal(nji_check_desc(&desc, &rows, &product, "test"), NJ_OK);
    return desc;
}

/* One of the two choices of a plan. */
typedef nj_status chooser(const nj_desc *, int64_t, int64_t, const nji_device_facts *,
                          const nj_preference *, nji_choice *, const char *);

static nji_choice choose_by(chooser *choose, const nj_desc *desc, int arch) {
    nji_device_facts facts;
    nj_preference pref;
    nji_choice choice;
    memset(&facts, 0, sizeof facts);
    memset(&pref, 0, sizeof pref);
    facts.arch = arch;
    facts.multiprocessors = 100;
    assert_int_equal(
        choose(desc, desc->shape[0], desc->shape[1], &facts, &pref, &choice, "test"), NJ_OK);
    return choice;
}

static nji_choice choose(const nj_desc *desc, int arch) {
    return choose_by(nji_choose, desc, arch);
}

static nji_choice choose_loose(const nj_desc *desc, int arch) {
    return choose_by(nji_choose_loose, desc, arch);
}

/* ---- rows ----------------------------------------------------------------------------------- */

static int is_served_by(const nji_tuning *row, const nj_desc *desc, int arch) {
    nji_device_facts facts;
    memset(&facts, 0, sizeof facts);
    facts.arch = arch;
    return nji_find_tuning(desc, row->forward, desc->shape[1], nji_vec_of(desc, desc->shape[1]),
                           &facts) == row;
}

/* A descriptor that this row of the table serves: at the most columns that it keeps in one block,
   warp or cluster, where registers are scarcest; if shorter rows are all another's, a long one,
   which is split. 0 when the row is not for this type and architecture. */
static int desc_served_by(const nji_tuning *row, nj_dtype dtype, int arch, nj_desc *desc) {
    nj_op op = row->forward ? NJ_OP_LAYER_NORM_FORWARD : NJ_OP_LAYER_NORM_BACKWARD;
    int64_t kept = (int64_t)row->elements * row->max_lanes * row->max_slices;
    int64_t cols = nji_min_i64(kept, row->max_cols) - (row->max_access < 16); /* odd: narrow */
    *desc = desc_of(op, dtype, NJ_DTYPE_UNSET, cols, 0);
    if (is_served_by(row, desc, arch)) return 1;
    *desc = desc_of(op, dtype, NJ_DTYPE_UNSET, (1 << 20) - (row->max_access < 16), 0);
    return is_served_by(row, desc, arch);
}

static void every_tuning_row_compiles_for_every_architecture(void **state) {
    size_t r;
    int a, dtype;
    (void)state;
    begin();
    for (r = 0; r < COUNT_OF(nji_tuning_table); r++) {
        int before = programs;
        for (a = 0; a < arch_count; a++) {
            /* f16 differs from bf16 in conversions alone: not once more for each architecture */
            for (dtype = a == arch_count / 2 ? NJ_F16 : NJ_BF16; dtype <= NJ_F64; dtype++) {
                nj_desc desc;
                nji_choice choice;
                kernel_report report;
                if (archs[a] < NJI_LEAST_ARCH) continue;
                if (!desc_served_by(&nji_tuning_table[r], (nj_dtype)dtype, archs[a], &desc))
                    continue;
                choice = choose(&desc, archs[a]);
                compile_fast(&desc, desc.shape[1], &choice, archs[a], &report);
            }
        }
        if (programs == before) print_error("row %zu of the table serves nothing\n", r);
        assert_true(programs > before);
    }
    assert_int_equal(programs_over_budget, 0);
}

/* At the least and the most columns of each row of the ring's table, of many rows and of few, with
   and without dgamma and dbeta. */
static void every_ring_compiles(void **state) {
    size_t r;
    int a, k;
    (void)state;
    begin();
    for (r = 0; r < COUNT_OF(nji_ring_table); r++) {
        const nji_ring_tuning *row = &nji_ring_table[r];
        nj_op op = row->forward ? NJ_OP_LAYER_NORM_FORWARD : NJ_OP_LAYER_NORM_BACKWARD;
        nj_dtype dtype = row->element_bytes == 2 ? NJ_BF16 : NJ_F32;
        for (a = 0; a < arch_count; a++) {
            for (k = 0; k < 6 && archs[a] >= 90; k++) {
                int64_t cols = k % 2 ? row->max_cols : (row->min_cols + 7) / 8 * 8;
                nj_desc desc = desc_of(op, dtype, NJ_DTYPE_UNSET, cols,
                                       !row->forward && k / 2 == 1 ? NJ_GRAD_DX : 0);
                nji_choice choice;
                kernel_report report;
                if (row->forward && k / 2 > 0) continue;
                if (k / 2 == 2) desc.shape[0] = 1;
                choice = choose(&desc, archs[a]);
                if (nji_most_shared(archs[a]) > 128 << 10)
                    assert_int_equal(choice.family, NJI_RING); /* else it may not fit */
                if (choice.family != NJI_RING) continue;
                assert_int_equal(choice.alone, k / 2 == 2);
                compile_fast(&desc, cols, &choice, archs[a], &report);
            }
        }
    }
    assert_int_equal(programs_over_budget, 0);
}

/* Where this row of the table serves loose kernels: the most columns that it keeps, or a long row;
   0 when it does not. `fewer` leaves the last threads without a column. */
static int64_t loose_cols(const nji_tuning *row, nj_dtype dtype, int arch, int fewer) {
    const int64_t kept = (int64_t)row->elements * row->max_lanes * row->max_slices;
    const int64_t cols[] = {nji_min_i64(kept, row->max_cols) - fewer, (1 << 20) - fewer};
    nji_device_facts facts;
    nj_desc desc;
    size_t i;
    memset(&desc, 0, sizeof desc);
    memset(&facts, 0, sizeof facts);
    desc.dtype = dtype;
    facts.arch = arch;
    for (i = 0; i < COUNT_OF(cols); i++) {
        if (nji_find_tuning(&desc, row->forward, cols[i], 1, &facts) == row) return cols[i];
    }
    return 0;
}

static void loose_kernels_of_every_tuning_row_compile_for_every_architecture(void **state) {
    size_t r;
    int a, dtype, splits = 0, before = programs;
    (void)state;
    begin();
    for (r = 0; r < COUNT_OF(nji_tuning_table); r++) {
        const nji_tuning *row = &nji_tuning_table[r];
        nj_op op = row->forward ? NJ_OP_LAYER_NORM_FORWARD : NJ_OP_LAYER_NORM_BACKWARD;
        for (a = (int)(r % 3); a < arch_count; a += 3) {
            for (dtype = NJ_BF16; dtype <= NJ_F64 && archs[a] >= NJI_LEAST_ARCH; dtype++) {
                int64_t cols = loose_cols(row, (nj_dtype)dtype, archs[a], a % 2);
                nj_desc desc;
                nji_choice choice;
                kernel_report report;
                if (cols == 0) continue;
                desc = desc_of(op, (nj_dtype)dtype, NJ_DTYPE_UNSET, cols, 0);
                choice = choose_loose(&desc, archs[a]);
                compile_fast(&desc, cols, &choice, archs[a], &report);
                splits += choice.family == NJI_SPLIT;
            }
        }
    }
    assert_true(programs > before + 100);
    assert_true(splits >= 4);
    assert_int_equal(programs_over_budget, 0);
}

/* Extents off the tables' round numbers: one column, odd ones (single-element accesses), those of
   models that broke other libraries, and rows so long that they are split. */
static void rows_of_any_length_compile(void **state) {
    static const int64_t lengths[] = {1,    2,    3,    7,    31,   33,    100,   127,      768,
                                      1000, 1600, 3584, 5120, 8200, 12345, 65536, 1ll << 20};
    static const nj_dtype types[] = {NJ_BF16, NJ_F32};
    int arch, forward, splits = 0;
    size_t i, t;
    (void)state;
    begin();
    arch = archs[arch_count / 2];
    for (i = 0; i < COUNT_OF(lengths); i++) {
        for (t = 0; t < COUNT_OF(types); t++) {
            for (forward = 0; forward <= 1; forward++) {
                nj_op op = forward ? NJ_OP_LAYER_NORM_FORWARD : NJ_OP_LAYER_NORM_BACKWARD;
                nj_desc desc = desc_of(op, types[t], NJ_DTYPE_UNSET, lengths[i], 0);
                nji_choice choice = choose(&desc, arch);
                kernel_report report;
                compile_fast(&desc, lengths[i], &choice, arch, &report);
                splits += choice.family == NJI_SPLIT;
                choice = choose_loose(&desc, arch);
                compile_fast(&desc, lengths[i], &choice, arch, &report);
            }
        }
    }
    assert_true(splits >= 4);
    assert_int_equal(programs_over_budget, 0);
}

/* Which gradients, with which parameters, in which types: all that a descriptor can say of one
 * shape. */
static void every_set_of_gradients_and_parameters_compiles(void **state) {
    uint32_t grads;
    int param, stat, parameters;
    (void)state;
    begin();
    for (grads = 0; grads <= 7; grads++) { /* 0: the forward */
        for (param = NJ_BF16; param <= NJ_F32; param++) {
            for (stat = NJ_BF16; stat <= NJ_F32; stat++) {
                for (parameters = 0; parameters <= 3; parameters++) {
                    nj_op op = grads ? NJ_OP_LAYER_NORM_BACKWARD : NJ_OP_LAYER_NORM_FORWARD;
                    nj_desc desc = desc_of(op, NJ_BF16, (nj_dtype)param, 1024, grads);
                    nji_choice choice;
                    kernel_report report;
                    desc.stat_dtype = (nj_dtype)stat;
                    desc.has_gamma = parameters & 1;
                    desc.has_beta = parameters >> 1;
                    if (stat == NJ_BF16 && parameters != 3) continue; /* types do not mix further */
                    if ((grads & NJ_GRAD_DGAMMA) && !desc.has_gamma) continue;
                    if ((grads & NJ_GRAD_DBETA) && !desc.has_beta) continue;
                    desc.accumulate = grads & (parameters == 3 ? 7u : 0u);
                    choice = choose(&desc, archs[0]);
                    compile_fast(&desc, 1024, &choice, archs[0], &report);
                    choice = choose_loose(&desc, archs[0]);
                    compile_fast(&desc, 1024, &choice, archs[0], &report);
                }
            }
        }
    }
    assert_int_equal(programs_over_budget, 0);
}

/* ---- tiles ---------------------------------------------------------------------------------- */

/* Channels first: few and many channels, runs of any alignment, every type. */
static void tiles_of_any_shape_compile(void **state) {
    static const int64_t shapes[][2] = {{1, 8},      {3, 64},   {24, 3136}, {96, 50176}, {256, 3136},
                                        {300, 98},   {512, 49}, {768, 196}, {1024, 64},  {1280, 256}};
    int a, dtype, forward, before = programs;
    size_t i;
    (void)state;
    begin();
    for (a = 0; a < arch_count; a += 3) {
        for (i = 0; i < COUNT_OF(shapes) && archs[a] >= NJI_LEAST_ARCH; i++) {
            for (dtype = NJ_BF16; dtype <= NJ_F64; dtype++) {
                for (forward = 0; forward <= 1; forward++) {
                    nj_desc desc = desc_of(
                        forward ? NJ_OP_LAYER_NORM_FORWARD : NJ_OP_LAYER_NORM_BACKWARD,
                        (nj_dtype)dtype, NJ_DTYPE_UNSET, shapes[i][0], 0);
                    nji_choice choice;
                    kernel_report report;
                    desc.rank = 3;
                    desc.shape[2] = shapes[i][1];
                    choice = choose(&desc, archs[a]);
                    if (choice.family == NJI_TILES) {
                        compile_fast(&desc, shapes[i][0], &choice, archs[a], &report);
                    } else {
                        assert_int_equal(choice.family, NJI_STRIDED); /* too many channels */
                    }
                }
            }
        }
    }
    assert_true(programs > before + 100);
    assert_int_equal(programs_over_budget, 0);
}

/* ---- strided -------------------------------------------------------------------------------- */

static void compile_strided(const nj_desc *desc, int arch) {
    nji_choice choice = choose(desc, arch);
    nji_jit_request request;
    nji_options options;
    kernel_report report;
    char what[64];
    memset(&request, 0, sizeof request);
    request.name = "norm_strided.cu";
    request.lines = nji_program_strided;
    request.source_hash = NJI_PROGRAM_STRIDED_HASH;
    request.arch = arch;
    nji_strided_options(desc, &choice, &options);
    snprintf(what, sizeof what, "sm_%d strided %s dtype %d", arch,
             choice.forward ? "forward" : "backward", (int)desc->dtype);
    compile(&request, &options, what, &report);
    assert_int_equal(report.kernels, choice.forward ? 1 : 3); /* dx, parts, sum of the parts */
    if (report.stack > MOST_STRIDED_STACK) fail_msg("%s: %ld bytes of stack", what, report.stack);
}

static void strided_kernels_compile_for_every_architecture(void **state) {
    int a, dtype;
    (void)state;
    begin();
    for (a = 0; a < arch_count; a++) {
        for (dtype = NJ_F16; dtype <= NJ_F64 && archs[a] >= NJI_LEAST_ARCH; dtype++) {
            nj_desc forward =
                desc_of(NJ_OP_LAYER_NORM_FORWARD, (nj_dtype)dtype, NJ_DTYPE_UNSET, 999, 0);
            nj_desc backward = forward;
            backward.op = NJ_OP_LAYER_NORM_BACKWARD;
            backward.grads = NJ_GRAD_DX | NJ_GRAD_DGAMMA | NJ_GRAD_DBETA;
            compile_strided(&forward, archs[a]);
            compile_strided(&backward, archs[a]);
        }
    }
}

/* ---- the embedded PTX ----------------------------------------------------------------------- */

/* Assembles it for the oldest and the newest architecture that this ptxas takes; the driver does
   the same on a user's machine. */
static void embedded_ptx_assembles(void **state) {
    static const char *const *const ptx[] = {nji_fallback_f16, nji_fallback_bf16, nji_fallback_f32,
                                             nji_fallback_f64};
    static const char *const entries[] = {"nj_strided_forward(", "nj_strided_backward(",
                                          "nj_strided_parts(", "nj_params_sum("};
    const char *assembler = NULL;
    size_t i, e;
    int arch;
    (void)state;
    if (system("ptxas --version >/dev/null 2>&1") == 0) {
        assembler = "ptxas";
    } else if (system("/usr/local/cuda/bin/ptxas --version >/dev/null 2>&1") == 0) {
        assembler = "/usr/local/cuda/bin/ptxas";
    }
    if (!assembler) print_message("no ptxas is installed: not assembled, only read\n");
    for (i = 0; i < COUNT_OF(ptx); i++) {
        char *text;
        size_t size;
        assert_int_equal(nji_jit_join(ptx[i], &text, &size, "test"), NJ_OK);
        for (e = 0; e < COUNT_OF(entries); e++) {
            char entry[64];
            snprintf(entry, sizeof entry, ".entry %s", entries[e]);
            assert_non_null(strstr(text, entry));
        }
        assert_non_null(strstr(text, ".target sm_75"));
        for (arch = 75; assembler && arch <= 90; arch += 15) {
            char command[160];
            FILE *pipe;
            snprintf(command, sizeof command, "%s --gpu-name sm_%d -o /dev/null -", assembler,
                     arch);
            pipe = popen(command, "w");
            assert_non_null(pipe);
            assert_int_equal(fwrite(text, size, 1, pipe), 1);
            assert_int_equal(pclose(pipe), 0);
        }
        NJ_FREE(text);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_tuning_row_compiles_for_every_architecture),
        cmocka_unit_test(every_ring_compiles),
        cmocka_unit_test(loose_kernels_of_every_tuning_row_compile_for_every_architecture),
        cmocka_unit_test(rows_of_any_length_compile),
        cmocka_unit_test(every_set_of_gradients_and_parameters_compiles),
        cmocka_unit_test(tiles_of_any_shape_compile),
        cmocka_unit_test(strided_kernels_compile_for_every_architecture),
        cmocka_unit_test(embedded_ptx_assembles),
    };
    return cmocka_run_group_tests_name("kernels compile", tests, open_nvrtc, close_nvrtc);
}
