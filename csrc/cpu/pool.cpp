#include "pool.h"

#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "simd.h"

namespace octavo {

// About 20 µs: the gap between two steps of a busy engine is longer, so idle threads sleep rather than take the core from
// the Python that prepares the next step.
constexpr int SPINS_BEFORE_SLEEP = 2000;
constexpr int SPINS_BEFORE_YIELD = 4000;

static inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

void Barrier::wait() {
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == count_ - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        claimed_.store(0, std::memory_order_relaxed);
        round_.store(round + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) {
        if (spins < SPINS_BEFORE_YIELD)
            pause();
        else
            std::this_thread::yield();
    }
}

class Pool {
   public:
    Pool(int count, const int* cpus) : count_(count), barrier_(count) {
        for (int i = 1; i < count; i++) {
            threads_.emplace_back([this, i] { work(i); });
#if defined(__linux__)
            if (cpus != nullptr) {
                cpu_set_t set;
                CPU_ZERO(&set);
                CPU_SET(cpus[i], &set);
                pthread_setaffinity_np(threads_.back().native_handle(), sizeof(set), &set);
            }
#endif
        }
    }

    ~Pool() {
        stop_ = true;
        start();
        for (auto& thread : threads_) thread.join();
    }

    void run(const Step* steps, int64_t num_steps) {
        steps_ = steps;
        num_steps_ = num_steps;
        if (count_ > 1) start();
        run_as(0);
    }

    int count() const { return count_; }

   private:
    void start() {
        generation_.fetch_add(1, std::memory_order_seq_cst);
#if defined(__linux__)
        if (sleepers_.load(std::memory_order_seq_cst) > 0)
            syscall(SYS_futex, (uint32_t*)&generation_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
    }

    void run_as(int index) {
        const Team team{index, count_, &barrier_};
        // Copies: once the last barrier is passed, the caller may be preparing its next run already.
        const Step* steps = steps_;
        const int64_t num_steps = num_steps_;
        for (int64_t i = 0; i < num_steps; i++) {
            steps[i].kernel(steps[i].args, team);
            team.sync();
        }
    }

    void work(int index) {
        uint32_t seen = 0;
        for (;;) {
            wait_for_work(seen);
            seen++;
            if (stop_) return;
            run_as(index);
        }
    }

    void wait_for_work(uint32_t seen) {
        for (int spins = 0; spins < SPINS_BEFORE_SLEEP; spins++) {
            if (generation_.load(std::memory_order_acquire) != seen) return;
            pause();
        }
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        while (generation_.load(std::memory_order_seq_cst) == seen) {
#if defined(__linux__)
            syscall(SYS_futex, (uint32_t*)&generation_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
            std::this_thread::yield();
#endif
        }
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }

    const int count_;
    Barrier barrier_;
    std::vector<std::thread> threads_;
    const Step* steps_ = nullptr;
    int64_t num_steps_ = 0;
    std::atomic<bool> stop_{false};
    alignas(64) std::atomic<uint32_t> generation_{0};
    alignas(64) std::atomic<int> sleepers_{0};
};

}  // namespace octavo

extern "C" {

octavo::Pool* octavo_pool_create(int count, const int* cpus) { return new octavo::Pool(count, cpus); }
void octavo_pool_destroy(octavo::Pool* pool) { delete pool; }
void octavo_pool_run(octavo::Pool* pool, const octavo::Step* steps, int64_t num_steps) { pool->run(steps, num_steps); }
int octavo_pool_threads(const octavo::Pool* pool) { return pool->count(); }
// Ask for large pages in [start, start + bytes), before the memory is first touched.
void octavo_prefer_large_pages(char* start, int64_t bytes) {
#if defined(__linux__)
    const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
    const uintptr_t first = (uintptr_t(start) + page - 1) / page * page, last = uintptr_t(start + bytes) / page * page;
    if (last > first) madvise((void*)first, last - first, MADV_HUGEPAGE);
#else
    (void)start, (void)bytes;
#endif
}
const char* octavo_instruction_set() { return octavo::INSTRUCTION_SET; }
int octavo_lanes() { return octavo::LANES; }
int octavo_signed_offset() { return octavo::SIGNED_OFFSET; }
}
