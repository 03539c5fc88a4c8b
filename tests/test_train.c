/* The trainer of examples/, compiled in double so that finite differences are sharp. */
#define _POSIX_C_SOURCE 200809L /* mkstemp */
#define TRAIN_NO_MAIN
#define TRAIN_REAL double
#include "../examples/train.c"

#include <setjmp.h>
#include <stdarg.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- running the program --------------------------------------------------------------------- */

typedef struct outcome {
    int status;
    char out[16384], err[4096];
} outcome;

static void read_back(FILE *file, char *text, size_t size) {
    rewind(file);
    text[fread(text, 1, size - 1, file)] = '\0';
    fclose(file);
}

/* Runs the program with the words of `line`, and `path`, when it is not NULL, as the last. */
static void run_train(outcome *o, const char *line, const char *path) {
    char words[512], *argv[32] = {NULL};
    FILE *out = tmpfile(), *err = tmpfile();
    int argc = 0;
    assert_non_null(out);
    assert_non_null(err);
    snprintf(words, sizeof words, "train %s", line);
    for (argv[argc] = strtok(words, " "); argv[argc]; argv[argc] = strtok(NULL, " ")) argc++;
    if (path) argv[argc++] = (char *)path;
    o->status = train_main(argc, argv, out, err);
    read_back(out, o->out, sizeof o->out);
    read_back(err, o->err, sizeof o->err);
}

/* A new file with these bytes; the caller unlinks it. */
static void write_file(char path[32], const char *bytes, size_t count) {
    int descriptor;
    snprintf(path, 32, "/tmp/test_train_XXXXXX");
    descriptor = mkstemp(path);
    assert_true(descriptor >= 0);
    assert_int_equal(write(descriptor, bytes, count), count);
    close(descriptor);
}

static void expect_failure(const char *line, const char *path, int status, const char *message) {
    outcome o;
    run_train(&o, line, path);
    assert_int_equal(o.status, status);
    assert_non_null(strstr(o.err, message));
    if (path) assert_non_null(strstr(o.err, path));
    assert_null(strstr(o.out, "loss:"));
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* A small model with a batch of the built-in text and its gradient. */
static void open_small(model *m, uint64_t seed) {
    text t;
    double loss;
    assert_true(text_from_bytes(&t, checking_text, (long)strlen(checking_text), stderr));
    assert_true(model_open(m, &checking_shape, t.vocabulary, NJ_BACKEND_HOST, &seed));
    text_batch(&t, m, &seed);
    assert_true(model_gradient(m, &loss));
    free(t.tokens);
}

static int largest(const param *p) {
    int i, most = 0;
    for (i = 1; i < p->count; i++)
        if (fabs(p->grad[i]) > fabs(p->grad[most])) most = i;
    return most;
}

static void every_gradient_agrees_with_central_differences(void **state) {
    static model m;
    uint64_t seed;
    (void)state;
    for (seed = 1; seed <= 3; seed++) {
        const char *where;
        double worst;
        open_small(&m, seed);
        /* embedding; input, output: 2 each; last norm: 2; a block: norm, up, down: 2 each */
        assert_int_equal(m.param_count, 7 + 6 * checking_shape.blocks);
        assert_true(check_gradients(&m, &worst, &where));
        if (worst > 1.0) fail_msg("seed %d: %s: %g tolerances", (int)seed, where, worst);
        model_close(&m);
    }
}

static void an_error_of_one_in_ten_thousand_in_one_gradient_is_noticed(void **state) {
    static model m;
    int i;
    (void)state;
    open_small(&m, 1);
    for (i = 0; i < m.param_count; i++) {
        param *p = &m.params[i];
        real *grad = &p->grad[largest(p)], value = *grad;
        const char *where;
        double worst;
        *grad = value * 1.0001;
        assert_true(check_gradients(&m, &worst, &where));
        *grad = value;
        assert_true(worst > 1.0);
        assert_string_equal(where, p->name);
    }
    model_close(&m);
}

static void a_tensor_without_any_gradient_fails_the_check(void **state) {
    static model m;
    const char *where;
    double worst;
    (void)state;
    open_small(&m, 1);
    zero(m.last.beta->grad, m.last.beta->count);
    assert_true(check_gradients(&m, &worst, &where));
    assert_true(isinf(worst));
    assert_string_equal(where, m.last.beta->name);
    model_close(&m);
}

/* Every backward pass adds: the norms' with NJ_GRAD_* in accumulate, the rest by hand. */
static void gradients_of_a_batch_seen_twice_are_twice_the_gradients(void **state) {
    static model once, twice;
    int i, j;
    (void)state;
    open_small(&once, 5);
    open_small(&twice, 5);
    assert_true(model_forward(&twice, checking_shape.batch));
    model_loss(&twice);
    assert_true(model_backward(&twice));
    for (i = 0; i < once.param_count; i++)
        for (j = 0; j < once.params[i].count; j++) {
            /* Each sum of at most some 20 terms below 1 starts from the first gradient, not from 0:
               its roundings differ. */
            const double difference = twice.params[i].grad[j] - 2.0 * once.params[i].grad[j];
            assert_true(fabs(difference) <= 40.0 * DBL_EPSILON);
        }
    model_close(&once);
    model_close(&twice);
}

static void one_row_gives_the_logits_of_that_row_in_a_batch(void **state) {
    static model m;
    double batch_logits[256];
    int i;
    (void)state;
    open_small(&m, 7);
    assert_true(model_forward(&m, checking_shape.batch));
    memcpy(batch_logits, m.logits, sizeof *m.logits * (size_t)m.vocabulary);
    assert_true(model_forward(&m, 1));
    for (i = 0; i < m.vocabulary; i++) /* a dozen sums of up to 12 terms near 1 */
        assert_true(fabs(m.logits[i] - batch_logits[i]) <= 150.0 * DBL_EPSILON);
    model_close(&m);
}

static void matmul_add_agrees_with_the_plain_sum_at_sizes_off_the_tiles(void **state) {
    static const int sizes[][3] = {
        {1, 1, 1}, {3, 31, 255}, {4, 32, 256}, {5, 33, 257}, {9, 70, 600}};
    static double a[9 * 600], b[600 * 70], c[9 * 70];
    uint64_t seed = 11;
    size_t s;
    int i, j, p;
    (void)state;
    for (s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const int m = sizes[s][0], n = sizes[s][1], k = sizes[s][2];
        view b_view = {b, 1, (size_t)k}; /* b lies transposed: n x k */
        for (i = 0; i < m * k; i++) a[i] = random_unit(&seed);
        for (i = 0; i < k * n; i++) b[i] = random_unit(&seed);
        for (i = 0; i < m * n; i++) c[i] = 1.0;
        matmul_add(m, n, k, packed(a, k), b_view, c);
        for (i = 0; i < m; i++)
            for (j = 0; j < n; j++) {
                double sum = 1.0;
                for (p = 0; p < k; p++) sum += a[i * k + p] * b[j * k + p];
                /* k additions of positive numbers in either order: k roundings of the sum each */
                assert_true(fabs(c[i * n + j] - sum) <= 2.0 * k * DBL_EPSILON * sum);
            }
    }
}

/* ---- training -------------------------------------------------------------------------------- */

static const char tiny_text[] =
    "she sells sea shells by the sea shore; the shells she sells are sea shells for sure. so if "
    "she sells shells on the sea shore, then the shells are sea shore shells.\n";

static void the_loss_falls_from_that_of_guessing_to_almost_nothing_on_a_tiny_text(void **state) {
    char path[32];
    outcome o;
    double first = 0, last = 0;
    const char *line;
    text t;
    (void)state;
    assert_true(text_from_bytes(&t, tiny_text, (long)strlen(tiny_text), stderr));
    write_file(path, tiny_text, strlen(tiny_text));
    run_train(&o, "--backend host --steps 150 --sample 40", path);
    unlink(path);
    assert_int_equal(o.status, 0);
    assert_string_equal(o.err, "");
    line = strstr(o.out, "\nloss: first ");
    assert_non_null(line);
    assert_int_equal(sscanf(line, " loss: first %lf last %lf", &first, &last), 2);
    /* Logits of a fresh model spread by about 0.6: near, not at, the loss of a uniform guess. */
    assert_true(fabs(first - log(t.vocabulary)) < 0.5);
    /* 16 characters nearly always tell the next one in this text. */
    assert_true(last < 0.3);
    free(t.tokens);
}

static void the_same_seed_gives_the_same_loss_and_sample_and_another_does_not(void **state) {
    char path[32];
    outcome one, same, other;
    (void)state;
    write_file(path, tiny_text, strlen(tiny_text));
    run_train(&one, "--backend host --steps 20 --seed 3", path);
    run_train(&same, "--backend host --steps 20 --seed 3", path);
    run_train(&other, "--backend host --steps 20 --seed 4", path);
    unlink(path);
    assert_int_equal(one.status, 0);
    /* From there on: what comes before has tokens/s in it. */
    assert_non_null(strstr(one.out, "\nloss:"));
    assert_string_equal(strstr(one.out, "\nloss:"), strstr(same.out, "\nloss:"));
    assert_string_not_equal(strstr(one.out, "\nloss:"), strstr(other.out, "\nloss:"));
}

static void the_sample_has_the_length_asked_for(void **state) {
    char path[32];
    const char *sample;
    outcome o;
    (void)state;
    write_file(path, tiny_text, strlen(tiny_text));
    run_train(&o, "--backend host --steps 1 --sample 57", path);
    unlink(path);
    sample = strstr(o.out, "sample:\n");
    assert_non_null(sample);
    assert_int_equal(strlen(sample), strlen("sample:\n") + 57 + strlen("\n"));
}

static void a_time_limit_ends_training_long_before_the_steps_do(void **state) {
    char path[32];
    outcome o;
    const double start = seconds_now();
    (void)state;
    write_file(path, tiny_text, strlen(tiny_text));
    run_train(&o, "--backend host --steps 100000000 --seconds 0.2 --sample 0", path);
    unlink(path);
    assert_int_equal(o.status, 0);
    assert_true(seconds_now() - start < 30.0); /* the steps would take days */
}

static void a_device_trains_with_the_right_gradients_and_its_absence_is_reported(void **state) {
    static gpu g;
    const int present = gpu_open(&g, 0);
    outcome o;
    (void)state;
    gpu_close(&g);
    run_train(&o, "--check --backend cuda", NULL);
    assert_int_equal(o.status, present ? 0 : 1);
    if (present) assert_non_null(strstr(o.out, "check: passed"));
    else assert_true(strncmp(o.err, "train: backend: ", 16) == 0 && strlen(o.err) > 30);
}

/* ---- bad input ------------------------------------------------------------------------------- */

static void files_that_cannot_be_used_give_exit_1_and_the_reason(void **state) {
    char path[32];
    (void)state;
    expect_failure("", "/nonexistent/text", 1, "No such file");
    expect_failure("", "/tmp", 1, "directory");
    write_file(path, "", 0);
    expect_failure("", path, 1, "0 bytes, at least 17");
    unlink(path);
    write_file(path, "sixteen bytes...", 16);
    expect_failure("", path, 1, "16 bytes, at least 17");
    unlink(path);
}

static void the_shortest_text_of_one_symbol_trains(void **state) {
    char path[32];
    outcome o;
    (void)state;
    write_file(path, "aaaaaaaaaaaaaaaaa", 17);
    run_train(&o, "--backend host --steps 2 --sample 3", path);
    unlink(path);
    assert_int_equal(o.status, 0);
    assert_non_null(strstr(o.out, "loss: first 0.00 last 0.00\nsample:\naaa\n"));
}

static void bad_options_give_exit_2_the_reason_and_the_usage(void **state) {
    static const char *const lines[] = {"",
                                        "--steps",
                                        "--steps 0",
                                        "--steps 1.5",
                                        "--steps x",
                                        "--steps 9e99",
                                        "--seconds -1",
                                        "--seconds nan",
                                        "--seed -1",
                                        "--sample 3x",
                                        "--backend",
                                        "--backend opencl",
                                        "--nonsense 1",
                                        "-",
                                        "one two"};
    size_t i;
    (void)state;
    for (i = 0; i < sizeof lines / sizeof *lines; i++) {
        outcome o;
        run_train(&o, lines[i], NULL);
        if (o.status != 2) fail_msg("train %s: exit %d", lines[i], o.status);
        assert_true(strncmp(o.err, "train: ", 7) == 0);
        assert_non_null(strstr(o.err, "\nusage: train"));
        assert_string_equal(o.out, "");
    }
}

static void help_prints_the_usage_and_succeeds(void **state) {
    outcome o;
    (void)state;
    run_train(&o, "--help", NULL);
    assert_int_equal(o.status, 0);
    assert_string_equal(o.out, usage);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_gradient_agrees_with_central_differences),
        cmocka_unit_test(an_error_of_one_in_ten_thousand_in_one_gradient_is_noticed),
        cmocka_unit_test(a_tensor_without_any_gradient_fails_the_check),
        cmocka_unit_test(gradients_of_a_batch_seen_twice_are_twice_the_gradients),
        cmocka_unit_test(one_row_gives_the_logits_of_that_row_in_a_batch),
        cmocka_unit_test(matmul_add_agrees_with_the_plain_sum_at_sizes_off_the_tiles),
        cmocka_unit_test(the_loss_falls_from_that_of_guessing_to_almost_nothing_on_a_tiny_text),
        cmocka_unit_test(the_same_seed_gives_the_same_loss_and_sample_and_another_does_not),
        cmocka_unit_test(the_sample_has_the_length_asked_for),
        cmocka_unit_test(a_time_limit_ends_training_long_before_the_steps_do),
        cmocka_unit_test(a_device_trains_with_the_right_gradients_and_its_absence_is_reported),
        cmocka_unit_test(files_that_cannot_be_used_give_exit_1_and_the_reason),
        cmocka_unit_test(the_shortest_text_of_one_symbol_trains),
        cmocka_unit_test(bad_options_give_exit_2_the_reason_and_the_usage),
        cmocka_unit_test(help_prints_the_usage_and_succeeds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
