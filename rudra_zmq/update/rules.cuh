// The rules and the encodings on one element: the formulas of rules.py and codecs.py for a GPU.
//
// Owns: what happens to the values. Must not know: threads, blocks, where vectors lie. Plain C, in the order of
// operations of rules.py; each operation is rounded once, which asks of the compiler that it fuse no multiplication
// with an addition (--fmad=false) and keep subnormals (--ftz=false). The kernels are in step.cu and codecs.cu.

struct Constants {
    float momentum, beta1, one_minus_beta1, beta2, one_minus_beta2, rho, one_minus_rho;
};

struct Scalars {
    float step, decay, eps;
};

typedef unsigned short half_bits;

// ---- the rules: the new weight from the weight w and the summed gradient g; a and b are the rule's state, in the order
// ---- of RULES

__device__ inline float decayed(const struct Scalars *p, float w, float g) {
    return p->decay != 0.0f ? g + p->decay * w : g;
}

__device__ inline float sgd(const struct Constants *c, const struct Scalars *p, float *a, float *b, float w, float g) {
    g = decayed(p, w, g);
    return w - g * p->step;
}

__device__ inline float momentum(const struct Constants *c, const struct Scalars *p, float *a, float *b, float w,
                                 float g) {
    g = decayed(p, w, g);
    *a = c->momentum * *a + g;
    return w - *a * p->step;
}

__device__ inline float nesterov(const struct Constants *c, const struct Scalars *p, float *a, float *b, float w,
                                 float g) {
    g = decayed(p, w, g);
    *a = c->momentum * *a + g;
    return w - (c->momentum * *a + g) * p->step;
}

__device__ inline float normalised(const struct Scalars *p, float square, float numerator) {
    return numerator / (sqrtf(square) + p->eps) * p->step;
}

__device__ inline float adagrad(const struct Constants *c, const struct Scalars *p, float *a, float *b, float w,
                                float g) {
    g = decayed(p, w, g);
    *a = *a + g * g;
    return w - normalised(p, *a, g);
}

__device__ inline float rudra_adagrad(const struct Constants *c, const struct Scalars *p, float *a, float *b, float w,
                                      float g) {
    g = decayed(p, w, g);
    *a = *a + g * g;
    *b = c->momentum * *b + g / sqrtf(*a + 1.0f);
    return w - *b * p->step;
}

__device__ inline float rmsprop(const struct Constants *c, const struct Scalars *p, float *a, float *b, float w,
                                float g) {
    g = decayed(p, w, g);
    *a = c->rho * *a + c->one_minus_rho * (g * g);
    return w - normalised(p, *a, g);
}

__device__ inline float adam_direction(const struct Constants *c, const struct Scalars *p, float *a, float *b,
                                       float g) {
    *a = c->beta1 * *a + c->one_minus_beta1 * g;
    *b = c->beta2 * *b + c->one_minus_beta2 * (g * g);
    return normalised(p, *b, *a);
}

__device__ inline float adam(const struct Constants *c, const struct Scalars *p, float *a, float *b, float w, float g) {
    return w - adam_direction(c, p, a, b, decayed(p, w, g));
}

__device__ inline float adamw(const struct Constants *c, const struct Scalars *p, float *a, float *b, float w,
                              float g) {
    return w - decayed(p, w, adam_direction(c, p, a, b, g));
}

// ---- what is finite

__device__ inline unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__device__ inline int is_finite(float x) { return magnitude(x) < 0x7f800000u; }

__device__ inline int is_finite_float16(half_bits h) { return (h & 0x7c00) != 0x7c00; }

__device__ inline int is_finite_bfloat16(half_bits h) { return (h & 0x7f80) != 0x7f80; }

// ---- the encodings

__device__ inline float from_float16(half_bits h) {
    unsigned sign = (h & 0x8000u) << 16, rest = h & 0x7fffu, exponent = rest >> 10;
    unsigned bits = (rest << 13) + (112u << 23) + (exponent == 31 ? 112u << 23 : 0u);
    float small = (float)(rest & 0x3ffu) * 5.9604644775390625e-8f; // times 2^-24: subnormals are exact too
    return __uint_as_float((exponent ? bits : __float_as_uint(small)) | sign);
}

__device__ inline float from_bfloat16(half_bits h) { return __uint_as_float((unsigned)h << 16); }

__device__ inline float from_int8(signed char q, float scale) { return (float)q * scale; }

__device__ inline half_bits to_float16(float x) {
    unsigned sign = (__float_as_uint(x) >> 16) & 0x8000u, bits = magnitude(x), result;
    if (bits > 0x7f800000u) {
        result = 0x7e00u | ((bits >> 13) & 0x3ffu);
    } else if (bits >= 0x47800000u) {
        result = 0x7c00u;
    } else if (bits >= 0x38800000u) { // normal: what rounds past the largest runs into infinity's pattern by itself
        result = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
    } else { // the last place of a number from 0.5 on is that of float16's subnormals
        result = __float_as_uint(__uint_as_float(bits) + 0.5f) - 0x3f000000u;
    }
    return (half_bits)(result | sign);
}

__device__ inline half_bits to_bfloat16(float x) {
    unsigned bits = __float_as_uint(x);
    if (magnitude(x) > 0x7f800000u) {
        return (half_bits)((bits >> 16) | 0x40u);
    }
    return (half_bits)((bits + (0x7fffu + ((bits >> 16) & 1u))) >> 16);
}

// int8: the scale from the largest magnitude of a block (as bits, which rise with it), and a value by its scale
__device__ inline float int8_scale(unsigned largest) { return __uint_as_float(largest) / 127.0f; }

__device__ inline int int8_is_finite(float scale) { return is_finite(scale * 128.0f); }

__device__ inline signed char to_int8(float x, float scale) {
    if (scale == 0.0f || !int8_is_finite(scale)) {
        return 0;
    }
    float q = rintf(x / scale);
    return (signed char)(q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q);
}

// topk: where a magnitude stands to the k-th largest; `ties` of those equal to it are taken, the first ones
__device__ inline int is_above(float x, unsigned cut) { return magnitude(x) > cut; }

__device__ inline int is_equal(float x, unsigned cut) { return magnitude(x) == cut; }

// topk, error feedback: what entries are taken from
__device__ inline float with_residual(float gradient, float residual) { return gradient + residual; }
