// The encoders of rules.cuh as kernels, and the decoder of topk.
//
// Owns: which thread does which elements. Kernels take addresses and integers alone; a flag becomes 1 where something
// is not finite, and what was written is then void.

#define THREADS 256 // of every block here
#define BINS 2048   // of a digit of topk: magnitudes have 31 bits, looked at as 11, 10 and 10
#define EACH (TILE / THREADS)

// to = x in float16 (encoding 1) or bfloat16 (2)
extern "C" __global__ void encode_halves(const float *x, half_bits *to, long long n, long long encoding, int *flag) {
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        half_bits h = encoding == 1 ? to_float16(x[i]) : to_bfloat16(x[i]);
        if (!(encoding == 1 ? is_finite_float16(h) : is_finite_bfloat16(h))) {
            *flag = 1;
        }
        to[i] = h;
    }
}

// A block of threads for each block of INT8_BLOCK elements.
extern "C" __global__ void encode_int8(const float *x, float *scales, signed char *q, long long n, int *flag) {
    __shared__ unsigned warps[THREADS / 32];
    float mine[INT8_BLOCK / THREADS];
    unsigned largest = 0;
    long long start = (long long)blockIdx.x * INT8_BLOCK;
    for (int j = 0; j < INT8_BLOCK / THREADS; j++) {
        long long i = start + j * THREADS + threadIdx.x;
        mine[j] = i < n ? x[i] : 0.0f;
        largest = max(largest, magnitude(mine[j]));
    }
    for (int apart = 16; apart; apart /= 2) {
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, apart));
    }
    if (threadIdx.x % 32 == 0) {
        warps[threadIdx.x / 32] = largest;
    }
    __syncthreads();
    largest = 0;
    for (int j = 0; j < THREADS / 32; j++) {
        largest = max(largest, warps[j]);
    }
    float scale = int8_scale(largest);
    for (int j = 0; j < INT8_BLOCK / THREADS; j++) {
        long long i = start + j * THREADS + threadIdx.x;
        if (i < n) {
            q[i] = to_int8(mine[j], scale);
        }
    }
    if (threadIdx.x == 0) {
        scales[blockIdx.x] = scale;
        if (!int8_is_finite(scale)) {
            *flag = 1;
        }
    }
}

// to, which is all zeros, gets the entries. An index past the end names the last element.
extern "C" __global__ void decode_topk(const unsigned *indices, const float *values, long long k, float *to,
                                       long long n) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < k) {
        to[indices[i] < n ? indices[i] : n - 1] = values[i];
    }
}

// ---- topk: the cut digit by digit, then the entries in order

struct Search {
    unsigned prefix; // the digits of the k-th largest magnitude that are known
    unsigned wanted; // of those with this prefix, how many are to be taken
};

// The exclusive sum over the threads of a block; all of them call it.
__device__ unsigned sum_before(unsigned value, unsigned *total) {
    __shared__ unsigned sums[THREADS];
    int t = (int)threadIdx.x;
    __syncthreads();
    sums[t] = value;
    for (int apart = 1; apart < THREADS; apart *= 2) {
        __syncthreads();
        unsigned other = t >= apart ? sums[t - apart] : 0;
        __syncthreads();
        sums[t] += other;
    }
    __syncthreads();
    *total = sums[THREADS - 1];
    return sums[t] - value;
}

__device__ void clear(unsigned *bins) {
    for (int bin = (int)threadIdx.x; bin < BINS; bin += THREADS) {
        bins[bin] = 0;
    }
    __syncthreads();
}

__device__ void add_to(unsigned *all, const unsigned *mine) {
    __syncthreads();
    for (int bin = (int)threadIdx.x; bin < BINS; bin += THREADS) {
        if (mine[bin]) {
            atomicAdd(&all[bin], mine[bin]);
        }
    }
}

// rest = gradient + residual, and how often each first digit occurs in it
extern "C" __global__ void topk_add(const float *gradient, const float *residual, float *rest, long long n,
                                    unsigned *bins, int *flag) {
    __shared__ unsigned mine[BINS];
    clear(mine);
    long long step = (long long)gridDim.x * THREADS;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) {
        float x = with_residual(gradient[i], residual[i]);
        if (!is_finite(x)) {
            *flag = 1;
        }
        rest[i] = x;
        atomicAdd(&mine[magnitude(x) >> 20], 1u);
    }
    add_to(bins, mine);
}

// How often each digit of 10 bits from `shift` on occurs behind the prefix.
extern "C" __global__ void topk_count(const float *x, long long n, const Search *search, long long shift,
                                      unsigned *bins) {
    __shared__ unsigned mine[BINS];
    clear(mine);
    unsigned prefix = search->prefix;
    long long step = (long long)gridDim.x * THREADS;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) {
        unsigned bits = magnitude(x[i]);
        if (bits >> (shift + 10) == prefix) {
            atomicAdd(&mine[(bits >> shift) & 1023u], 1u);
        }
    }
    add_to(bins, mine);
}

// The next digit of the k-th largest: from the largest one down, the first at which enough have been seen. One block;
// it leaves the bins at 0.
extern "C" __global__ void topk_pick(Search *search, unsigned *bins, long long digit_bits) {
    __shared__ Search found;
    const int share = BINS / THREADS;
    int last = BINS - 1 - (int)threadIdx.x * share;
    unsigned wanted = search->wanted, prefix = search->prefix, own = 0, all;
    for (int j = 0; j < share; j++) {
        own += bins[last - j];
    }
    unsigned seen = sum_before(own, &all);
    if (seen < wanted && seen + own >= wanted) {
        int bin = last;
        while (seen + bins[bin] < wanted) {
            seen += bins[bin--];
        }
        found.prefix = prefix << digit_bits | (unsigned)bin;
        found.wanted = wanted - seen;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        *search = found;
    }
    for (int bin = (int)threadIdx.x; bin < BINS; bin += THREADS) {
        bins[bin] = 0;
    }
}

// Of a thread's EACH elements in a row, how many are above the cut and how many at it.
__device__ void count_mine(const float *x, long long n, unsigned cut, unsigned *above, unsigned *equal) {
    long long first = (long long)blockIdx.x * TILE + threadIdx.x * EACH;
    for (long long i = first; i < first + EACH && i < n; i++) {
        *above += is_above(x[i], cut);
        *equal += is_equal(x[i], cut);
    }
}

extern "C" __global__ void topk_tiles(const float *x, long long n, const Search *search, unsigned *above,
                                      unsigned *equal) {
    unsigned a = 0, e = 0, all_above, all_equal;
    count_mine(x, n, search->prefix, &a, &e);
    sum_before(a, &all_above);
    sum_before(e, &all_equal);
    if (threadIdx.x == 0) {
        above[blockIdx.x] = all_above;
        equal[blockIdx.x] = all_equal;
    }
}

// Both counts become those of the tiles before. One block.
extern "C" __global__ void topk_places(unsigned *above, unsigned *equal, long long tiles) {
    unsigned a = 0, e = 0, more;
    for (long long first = 0; first < tiles; first += THREADS) {
        long long tile = first + threadIdx.x;
        unsigned before = sum_before(tile < tiles ? above[tile] : 0, &more);
        if (tile < tiles) {
            above[tile] = a + before;
        }
        a += more;
        before = sum_before(tile < tiles ? equal[tile] : 0, &more);
        if (tile < tiles) {
            equal[tile] = e + before;
        }
        e += more;
    }
}

// The entries by rising index; of x they are set to 0.
extern "C" __global__ void topk_take(float *x, long long n, const Search *search, const unsigned *above,
                                     const unsigned *equal, unsigned *indices, float *values) {
    unsigned a = 0, e = 0, all, cut = search->prefix, ties = search->wanted;
    count_mine(x, n, cut, &a, &e);
    a = above[blockIdx.x] + sum_before(a, &all);
    e = equal[blockIdx.x] + sum_before(e, &all);
    long long first = (long long)blockIdx.x * TILE + threadIdx.x * EACH;
    for (long long i = first; i < first + EACH && i < n; i++) {
        int at_cut = is_equal(x[i], cut);
        if (is_above(x[i], cut) || (at_cut && e < ties)) {
            unsigned place = a + min(e, ties);
            indices[place] = (unsigned)i;
            values[place] = x[i];
            a += !at_cut;
            x[i] = 0.0f;
        }
        e += at_cut;
    }
}
