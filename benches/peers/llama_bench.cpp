// One measurement of llama.cpp through its public C interface, printed as one JSON object.
//
//   llama_bench MODEL.gguf THREADS prefill TOKENS STEP
//   llama_bench MODEL.gguf THREADS decode SEQUENCES CONTEXT STEPS
//
// STEP is how many tokens of a prompt go in one step.
//
// Only prompt steps are timed in a prefill, only decode steps in a decode; each is warmed up. CPU
// time is that of the process. Token ids are random and the same in every run.
#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/resource.h>
#include <time.h>

static const int STEP_TOKENS = 512;    // rows of a prompt step, as deltapool's default
static const int WARM_UP_TOKENS = 512; // of the untimed prompt
static const int WARM_UP_STEPS = 2;    // untimed steps before those of a decode

static double seconds(clockid_t clock) {
    timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void fail(const char * what) {
    fprintf(stderr, "llama_bench: %s\n", what);
    exit(1);
}

static int number(const char * text) {
    char * end = nullptr;
    const long value = strtol(text, &end, 10);
    if (*text == 0 || *end != 0 || value < 0 || value > 1 << 24) fail("a number is out of range");
    return (int) value;
}

// A batch of tokens, each of one sequence.
struct Batch {
    llama_batch batch;
    explicit Batch(int most) : batch(llama_batch_init(most, 0, 1)) {}
    ~Batch() { llama_batch_free(batch); }
    void clear() { batch.n_tokens = 0; }
    void add(int token, int position, int sequence, bool wants_logits) {
        const int i = batch.n_tokens++;
        batch.token[i] = token;
        batch.pos[i] = position;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = sequence;
        batch.logits[i] = wants_logits;
    }
};

struct Bench {
    llama_model * model;
    llama_context * context = nullptr;
    int step_tokens = STEP_TOKENS;
    int vocab;
    unsigned random = 12345;

    int token() {
        random = random * 1664525u + 1013904223u;
        return (random >> 8) % vocab;
    }

    void open(int tokens, int sequences, int threads) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx = tokens;
        params.n_seq_max = sequences;
        params.n_batch = params.n_ubatch = std::max(step_tokens, sequences);
        params.n_threads = params.n_threads_batch = threads;
        params.no_perf = true;
        context = llama_init_from_model(model, params);
        if (!context) fail("no context of that size");
    }

    void step(const Batch & batch) {
        if (llama_decode(context, batch.batch)) fail("llama_decode failed");
    }

    void prompt(Batch & batch, int tokens, int sequence) {
        for (int at = 0; at < tokens; at += step_tokens) {
            const int rows = std::min(step_tokens, tokens - at);
            batch.clear();
            for (int i = at; i < at + rows; i++) batch.add(token(), i, sequence, i == tokens - 1);
            step(batch);
        }
        llama_synchronize(context);
    }

    void decode(Batch & batch, int sequences, int & position, int steps) {
        for (int i = 0; i < steps; i++, position++) {
            batch.clear();
            for (int s = 0; s < sequences; s++) batch.add(token(), position, s, true);
            step(batch);
            // Waits until the logits are there.
            llama_get_logits_ith(context, 0);
        }
    }
};

int main(int argc, char ** argv) {
    const bool is_prefill = argc == 6 && !strcmp(argv[3], "prefill");
    const bool is_decode = argc == 7 && !strcmp(argv[3], "decode");
    if (!is_prefill && !is_decode) {
        fail("usage: MODEL.gguf THREADS prefill TOKENS STEP | decode SEQUENCES CONTEXT STEPS");
    }
    const int threads = number(argv[2]);
    llama_log_set(
        [](ggml_log_level level, const char * text, void *) {
            if (level >= GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
        },
        nullptr);
    llama_backend_init();
    Bench bench;
    llama_model_params params = llama_model_default_params();
    params.progress_callback = [](float, void *) { return true; };
    bench.model = llama_model_load_from_file(argv[1], params);
    if (!bench.model) fail("the model cannot be loaded");
    bench.vocab = llama_vocab_n_tokens(llama_model_get_vocab(bench.model));

    double tokens, wall, cpu;
    const auto start = [&] {
        wall = seconds(CLOCK_MONOTONIC);
        cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
    };
    if (is_prefill) {
        const int length = number(argv[4]);
        bench.step_tokens = std::max(number(argv[5]), 1);
        Batch batch(bench.step_tokens);
        bench.open(length + 64, 1, threads);
        bench.prompt(batch, std::min(length, WARM_UP_TOKENS), 0);
        llama_memory_clear(llama_get_memory(bench.context), true);
        start();
        bench.prompt(batch, length, 0);
        tokens = length;
    } else {
        const int sequences = number(argv[4]), context = number(argv[5]), steps = number(argv[6]);
        Batch batch(std::max(STEP_TOKENS, sequences));
        bench.open(sequences * (context + steps + WARM_UP_STEPS + 64), sequences, threads);
        for (int s = 0; s < sequences; s++) bench.prompt(batch, context, s);
        int position = context;
        bench.decode(batch, sequences, position, WARM_UP_STEPS);
        start();
        bench.decode(batch, sequences, position, steps);
        tokens = (double) sequences * steps;
    }
    cpu = seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    wall = seconds(CLOCK_MONOTONIC) - wall;
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    printf("{\"tokens_per_cpu_second\": %.4f, \"tokens_per_wall_second\": %.4f, "
           "\"peak_rss_bytes\": %lld, \"weights_bytes\": %llu}\n",
           tokens / cpu, tokens / wall, (long long) usage.ru_maxrss * 1024,
           (unsigned long long) llama_model_size(bench.model));
    llama_free(bench.context);
    llama_model_free(bench.model);
}
