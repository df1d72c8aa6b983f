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

   private:
    const int count_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
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
};

typedef void (*Kernel)(const void* args, const Team& team);

// One entry of a program. A kernel may sync inside; a barrier follows it in any case.
struct Step {
    Kernel kernel;
    const void* args;
};

class Pool;

}  // namespace octavo

extern "C" void octavo_pool_run(octavo::Pool* pool, const octavo::Step* steps, int64_t num_steps);
