// The update of rules.cuh as kernels: one pass over memory for any number of gradients in any encodings.
//
// Owns: which thread does which elements, and how they are read and written. RULE names the rule. Kernels take
// addresses and integers alone: a float would arrive as whatever the caller's language makes of it.

struct Gradient {
    const void *data;
    const float *scales; // of int8
    float b;
    int encoding;
};

struct Piece { // elements [start, stop) of one kind of group; a block's work
    long long start, stop, kind;
};

enum { FLOAT32, FLOAT16, BFLOAT16, INT8 };

#define BATCH 4 // gradients that are on their way from memory at a time

struct Packed { // elements as they lie in memory: 4, or 1 in the lowest bits of the first word
    unsigned word[4];
};

// N elements are 4, read as one word of up to 16 bytes, or 1.
template <int N> __device__ Packed fetch(const Gradient &g, long long i) {
    Packed p = {};
    if (N == 1) {
        p.word[0] = g.encoding == FLOAT32  ? ((const unsigned *)g.data)[i]
                    : g.encoding == INT8 ? ((const unsigned char *)g.data)[i]
                                         : ((const half_bits *)g.data)[i];
    } else if (g.encoding == FLOAT32) {
        uint4 v = *(const uint4 *)((const unsigned *)g.data + i);
        p.word[0] = v.x, p.word[1] = v.y, p.word[2] = v.z, p.word[3] = v.w;
    } else if (g.encoding == INT8) {
        p.word[0] = *(const unsigned *)((const unsigned char *)g.data + i);
    } else {
        uint2 v = *(const uint2 *)((const half_bits *)g.data + i);
        p.word[0] = v.x, p.word[1] = v.y;
    }
    return p;
}

__device__ float element(int encoding, const Packed &p, int e, float scale) {
    if (encoding == FLOAT32) {
        return __uint_as_float(p.word[e]);
    }
    if (encoding == INT8) {
        return from_int8((signed char)(p.word[0] >> (8 * e)), scale);
    }
    half_bits h = (half_bits)(p.word[e / 2] >> (16 * (e % 2)));
    return encoding == FLOAT16 ? from_float16(h) : from_bfloat16(h);
}

template <int N> __device__ void load(const float *from, long long i, float *x) {
    if (N == 1) {
        x[0] = from[i];
    } else {
        float4 v = *(const float4 *)(from + i);
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    }
}

template <int N> __device__ void store(float *to, long long i, const float *x) {
    if (N == 1) {
        to[i] = x[0];
    } else {
        float4 v = {x[0], x[1], x[2], x[3]};
        *(float4 *)(to + i) = v;
    }
}

// The sum in the order of the gradients. It starts at -0, which leaves the first product as it is.
template <int N> __device__ void sum_at(const Gradient *__restrict__ g, int c, long long i, float *acc) {
    for (int e = 0; e < N; e++) {
        acc[e] = -0.0f;
    }
    for (int k = 0; k < c; k += BATCH) {
        Packed p[BATCH];
        float scale[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            if (k + j < c) {
                p[j] = fetch<N>(g[k + j], i);
                scale[j] = g[k + j].encoding == INT8 ? g[k + j].scales[i / INT8_BLOCK] : 0.0f;
            }
        }
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            if (k + j < c) {
#pragma unroll
                for (int e = 0; e < N; e++) {
                    acc[e] = acc[e] + g[k + j].b * element(g[k + j].encoding, p[j], e, scale[j]);
                }
            }
        }
    }
}

// The new weights as they are sent down, written beside them; whether all are finite.
template <int N> __device__ int store_halves(half_bits *to, int encoding, long long i, const float *x) {
    half_bits h[4] = {};
    int finite = 1;
    for (int e = 0; e < N; e++) {
        h[e] = encoding == FLOAT16 ? to_float16(x[e]) : to_bfloat16(x[e]);
        finite &= encoding == FLOAT16 ? is_finite_float16(h[e]) : is_finite_bfloat16(h[e]);
    }
    if (N == 1) {
        to[i] = h[0];
    } else {
        uint2 v = {h[0] | (unsigned)h[1] << 16, h[2] | (unsigned)h[3] << 16};
        *(uint2 *)(to + i) = v;
    }
    return finite;
}

struct Step { // the arguments of `step`
    const Gradient *gradients;
    long long c;
    const float *w;
    float *out, *a, *b;
    half_bits *sent;
    long long sent_encoding;
    const Constants *constants;
    int *flags;
};

template <int N> __device__ void step_at(const Step &s, const Scalars *p, long long i) {
    float g[N], w[N], a[N] = {}, b[N] = {};
    sum_at<N>(s.gradients, (int)s.c, i, g);
    load<N>(s.w, i, w);
    if (s.a) {
        load<N>(s.a, i, a);
    }
    if (s.b) {
        load<N>(s.b, i, b);
    }
    int finite = 1;
#pragma unroll
    for (int e = 0; e < N; e++) {
        finite &= is_finite(g[e]);
        w[e] = RULE(s.constants, p, &a[e], &b[e], w[e], g[e]);
    }
    if (!finite) {
        s.flags[0] = 1;
    }
    if (s.a) {
        store<N>(s.a, i, a);
    }
    if (s.b) {
        store<N>(s.b, i, b);
    }
    store<N>(s.out, i, w);
    if (s.sent && !store_halves<N>(s.sent, (int)s.sent_encoding, i, w)) {
        s.flags[1] = 1;
    }
}

// Of a piece, what is read in words of 16 bytes; the rest, at either end, one element at a time.
struct Cut {
    long long from, to;
};

__device__ Cut cut(const Piece &piece, int wide) {
    long long from = (piece.start + 3) / 4 * 4, to = piece.stop / 4 * 4;
    Cut c = {piece.stop, piece.stop};
    if (wide && from < to) {
        c.from = from, c.to = to;
    }
    return c;
}

__device__ long long singles(const Piece &piece, const Cut &fours) {
    return (fours.from - piece.start) + (piece.stop - fours.to);
}

__device__ long long single(const Piece &piece, const Cut &fours, long long j) {
    long long before = fours.from - piece.start;
    return j < before ? piece.start + j : fours.to + (j - before);
}

// sum, rule, state, new weights, and the new weights as they are sent. flags[0] becomes 1 where the sum is not finite,
// flags[1] where what is sent is not. wide: all vectors begin where words of 16 bytes may.
extern "C" __global__ void step(const Piece *pieces, const Gradient *gradients, long long c, const float *w, float *out,
                                float *a, float *b, half_bits *sent, long long sent_encoding, const Constants *constants,
                                const Scalars *kinds, int *flags, long long wide) {
    Step s = {gradients, c, w, out, a, b, sent, sent_encoding, constants, flags};
    Piece piece = pieces[blockIdx.x];
    Cut fours = cut(piece, (int)wide);
    const Scalars *p = kinds + piece.kind;
    for (long long i = fours.from + 4 * threadIdx.x; i < fours.to; i += 4 * blockDim.x) {
        step_at<4>(s, p, i);
    }
    for (long long j = threadIdx.x; j < singles(piece, fours); j += blockDim.x) {
        step_at<1>(s, p, single(piece, fours, j));
    }
}

// out = the sum. It may be one of the gradients.
extern "C" __global__ void sum(const Piece *pieces, const Gradient *gradients, long long c, float *out,
                               long long wide) {
    Piece piece = pieces[blockIdx.x];
    Cut fours = cut(piece, (int)wide);
    float acc[4];
    for (long long i = fours.from + 4 * threadIdx.x; i < fours.to; i += 4 * blockDim.x) {
        sum_at<4>(gradients, (int)c, i, acc);
        store<4>(out, i, acc);
    }
    for (long long j = threadIdx.x; j < singles(piece, fours); j += blockDim.x) {
        long long i = single(piece, fours, j);
        sum_at<1>(gradients, (int)c, i, acc);
        store<1>(out, i, acc);
    }
}

// squares[block] = the sum of squares of a block of NORM_BLOCK elements, added as NumPy's pairwise sum adds them: 8 sums
// side by side over 128 numbers, then neighbours, again and again. NORM_BLOCK / 16 threads.
extern "C" __global__ void squares(const float *x, double *squares) {
    __shared__ double sums[NORM_BLOCK / 16];
    int t = (int)threadIdx.x;
    const float *mine = x + (long long)blockIdx.x * NORM_BLOCK + t / 8 * 128 + t % 8;
    double total = (double)mine[0] * (double)mine[0];
    for (int j = 1; j < 16; j++) {
        total = total + (double)mine[8 * j] * (double)mine[8 * j];
    }
    sums[t] = total;
    for (int apart = 1; apart < NORM_BLOCK / 16; apart *= 2) {
        __syncthreads();
        if (t % (2 * apart) == 0) {
            sums[t] = sums[t] + sums[t + apart];
        }
    }
    if (t == 0) {
        squares[blockIdx.x] = sums[0];
    }
}
