// A team of pinned threads that runs a list of kernels, meeting at a barrier after each.
#pragma once

#include <atomic>
#include <cstdint>

namespace octavo {

// Spins briefly, then yields: threads that wait for each other inside a run are never far apart, unless the machine is busy.
class Barrier {
   public:
    explicit Barrier(int count) : count_(count) {}
    void wait();
    // 0, 1, 2 … each once among the threads; from 0 again after every wait.
    int64_t claim() { return claimed_.fetch_add(1, std::memory_order_relaxed); }

   private:
    const int count_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
    alignas(64) std::atomic<int64_t> claimed_{0};
};

// One thread's view of the team.
struct Team {
    int index;
    int count;
    Barrier* barrier;

    void sync() const {
        if (count > 1) barrier->wait();
    }
    // This thread's share [first, last) of `total` equal pieces of work.
    void share(int64_t total, int64_t& first, int64_t& last) const {
        first = total * index / count;
        last = total * (index + 1) / count;
    }
    // Run work(i) for every i below `total`, each on the thread that is free first: a core that others use as well, or that
    // runs slower, takes less of it. Once between two syncs.
    template <typename F>
    void each(int64_t total, const F& work) const {
        if (count == 1) {
            for (int64_t i = 0; i < total; i++) work(i);
            return;
        }
        for (int64_t i = barrier->claim(); i < total; i = barrier->claim()) work(i);
    }
};

typedef void (*Kernel)(const void* args, const Team& team);

// A number in a kernel's arguments that may differ from one run of a program to the next: of tokens, or of requests.
struct Count {
    const int64_t* value;
    operator int64_t() const { return *value; }
};

// One entry of a program. A kernel may sync inside; a barrier follows it in any case.
struct Step {
    Kernel kernel;
    const void* args;
};

class Pool;

}  // namespace octavo

extern "C" void octavo_pool_run(octavo::Pool* pool, const octavo::Step* steps, int64_t num_steps);
extern "C" int octavo_pool_threads(const octavo::Pool* pool);
