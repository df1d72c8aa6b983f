// Runs a kernel on data from a file, for test_neon.py: this is cross-compiled with the kernels and run by an emulator.
//
//     driver linear TYPE ROWS COLS TOKENS in out     in: GGUF blocks, x [TOKENS, COLS]; out: x @ W.T of all tokens, of one
//     driver sample ROWS VOCAB in out                in: logits and parameters as below; out: token ids

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "linear.cpp"
#include "sample.cpp"

extern "C" octavo::Pool* octavo_pool_create(int count, const int* cpus);
extern "C" int64_t octavo_gguf_describe(const char*, int64_t, int64_t, octavo::PackedWeight*);
extern "C" void octavo_gguf_pack(octavo::Pool*, const char*, const uint8_t*, uint8_t*, octavo::PackedWeight*);
extern "C" const char* octavo_instruction_set();

using namespace octavo;

static std::vector<uint8_t> read_all(const char* path) {
    FILE* file = std::fopen(path, "rb");
    std::fseek(file, 0, SEEK_END);
    std::vector<uint8_t> bytes(size_t(std::ftell(file)));
    std::rewind(file);
    if (std::fread(bytes.data(), 1, bytes.size(), file) != bytes.size()) std::exit(2);
    std::fclose(file);
    return bytes;
}

template <typename T>
static T* take(uint8_t*& from, int64_t count) {
    T* taken = (T*)from;
    from += count * int64_t(sizeof(T));
    return taken;
}

int main(int, char** argv) {
    Pool* pool = octavo_pool_create(2, nullptr);
    FILE* out = nullptr;
    if (std::strcmp(argv[1], "linear") == 0) {
        const int64_t rows = std::atoll(argv[3]), cols = std::atoll(argv[4]), tokens = std::atoll(argv[5]);
        std::vector<uint8_t> in = read_all(argv[6]);
        const float* x = (const float*)(in.data() + in.size() - size_t(tokens * cols) * sizeof(float));
        LinearArgs args{};
        std::vector<uint8_t> packed(size_t(octavo_gguf_describe(argv[2], rows, cols, &args.shards[0])) + 64);
        octavo_gguf_pack(pool, argv[2], in.data(), packed.data(), &args.shards[0]);
        std::vector<uint8_t> workspace(size_t(octavo_linear_workspace(tokens, cols, 1, 2)) + 64);
        std::vector<float> y(size_t(tokens * rows));
        int64_t count = tokens;
        args.x = x, args.x_stride = args.cols = cols, args.tokens.value = &count, args.num_shards = 1, args.terms = 1;
        args.scale = 1, args.out = y.data(), args.out_stride = rows, args.workspace = workspace.data();
        const Step step{linear, &args};
        out = std::fopen(argv[7], "wb");
        for (int64_t some : {tokens, int64_t(1)}) {
            count = some;
            octavo_pool_run(pool, &step, 1);
            std::fwrite(y.data(), sizeof(float), size_t(some * rows), out);
        }
    } else {
        const int64_t rows = std::atoll(argv[2]), vocab = std::atoll(argv[3]);
        std::vector<uint8_t> in = read_all(argv[4]);
        uint8_t* from = in.data();
        std::vector<float> scratch(size_t(2 * vocab));
        std::vector<int32_t> ids(size_t(rows), 0);
        std::vector<uint8_t> is_bad(size_t(rows), 0);
        SampleArgs args{};
        args.seeds = take<int64_t>(from, rows), args.logits = take<float>(from, rows * vocab), args.stride = args.vocab = vocab;
        args.row_ids = take<int32_t>(from, rows), args.positions = take<int32_t>(from, rows);
        args.temperature = take<float>(from, rows), args.top_p = take<float>(from, rows);
        args.min_p = take<float>(from, rows), args.top_k = take<int32_t>(from, rows);
        args.rows.value = &rows, args.token_ids = ids.data(), args.is_bad = is_bad.data(), args.workspace = scratch.data();
        const Step step{sample, &args};
        octavo_pool_run(pool, &step, 1);
        out = std::fopen(argv[5], "wb");
        std::fwrite(ids.data(), sizeof(int32_t), size_t(rows), out);
    }
    std::fclose(out);
    std::puts(octavo_instruction_set());
    std::fflush(stdout);
    std::_Exit(0);
}
