// What CUDA C++ has and C++ lacks, so that g++ can make the kernels into functions of a CPU. Included before their text.
//
// A block's threads are fibers that take turns: each runs until it ends or waits for the others, in rising and in falling
// order by turns, so that what lacks a barrier shows. Blocks come one after the other. `launch` says where threads of a
// block wait in different places, which on a GPU would never end.
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#define __device__
#define __global__
#define __shared__ static

enum { MOST_THREADS = 1024, STACK = 1 << 16, ARGUMENTS = 16 };

struct Place {
    unsigned x;
};
Place threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }

inline unsigned atomicAdd(unsigned *to, unsigned value) {
    unsigned before = *to;
    *to += value;
    return before;
}

ucontext_t scheduler, fibers[MOST_THREADS];
char stacks[MOST_THREADS][STACK];
int waits_at[MOST_THREADS]; // a line, 0 while running, -1 at the end
unsigned lanes[MOST_THREADS];
void *kernel;
uint64_t arguments[ARGUMENTS];

inline void wait_at(int line) {
    unsigned t = threadIdx.x;
    waits_at[t] = line;
    swapcontext(&fibers[t], &scheduler);
}

#define __syncthreads() wait_at(__LINE__)

inline unsigned exchange(unsigned value, unsigned with, int line) {
    lanes[threadIdx.x] = value;
    wait_at(line);
    unsigned theirs = lanes[threadIdx.x ^ with];
    wait_at(line);
    return theirs;
}

#define __shfl_xor_sync(mask, value, with) exchange(value, with, __LINE__)

// Addresses and integers, each in a register or a word of the stack of its own; a callee ignores what it does not take.
typedef void (*Kernel)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                       uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);

inline void thread() {
    uint64_t *a = arguments;
    ((Kernel)kernel)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15]);
    wait_at(-1);
}

inline int run_block() {
    for (unsigned t = 0; t < blockDim.x; t++) {
        getcontext(&fibers[t]);
        fibers[t].uc_stack.ss_sp = stacks[t];
        fibers[t].uc_stack.ss_size = STACK;
        fibers[t].uc_link = nullptr;
        makecontext(&fibers[t], thread, 0);
        waits_at[t] = 0;
    }
    for (int turn = 0; waits_at[0] >= 0; turn++) {
        for (unsigned k = 0; k < blockDim.x; k++) {
            threadIdx.x = turn % 2 ? blockDim.x - 1 - k : k;
            swapcontext(&scheduler, &fibers[threadIdx.x]);
        }
        for (unsigned t = 1; t < blockDim.x; t++) {
            if (waits_at[t] != waits_at[0]) {
                return 1;
            }
        }
    }
    return 0;
}

// 0, or 1 where the threads of a block were not together.
extern "C" int launch(void *function, unsigned grid, unsigned block, const uint64_t *given) {
    kernel = function;
    memcpy(arguments, given, sizeof arguments);
    gridDim.x = grid;
    blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) {
        if (run_block()) {
            return 1;
        }
    }
    return 0;
}
