// What depends on the chip: number formats as raw bits, rounding, loads past the first-level cache.
//
// Nothing is included: the kernels need no CUDA headers, so NVRTC compiles them wherever it is
// installed, and fast. A translation unit includes this file first; the tests put their own
// definitions of the same names in its place and compile the other files with g++.
#pragma once

struct Half {
  unsigned short bits;
};
struct BFloat16 {
  unsigned short bits;
};

__device__ inline float to_float(float value) { return value; }

__device__ inline float to_float(Half value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

__device__ inline float to_float(BFloat16 value) {
  return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}

__device__ inline void round_to(float value, float* result) { *result = value; }

__device__ inline void round_to(float value, Half* result) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result->bits) : "f"(value));
}

__device__ inline void round_to(float value, BFloat16* result) {
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result->bits) : "f"(value));
#else
  // Turing has no such instruction: add half of the last place kept, less one if that is even.
  const unsigned bits = __float_as_uint(value);
  const unsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  result->bits = static_cast<unsigned short>(value == value ? rounded : 0x7fffu);
#endif
}

// Two elements in one register, the first in memory in the lower half: one instruction each.
template <typename T>
__device__ inline unsigned pack(float first, float second) {
  T low, high;
  round_to(first, &low);
  round_to(second, &high);
  return low.bits | static_cast<unsigned>(high.bits) << 16;
}

#if __CUDA_ARCH__ >= 800
template <>
__device__ inline unsigned pack<Half>(float first, float second) {
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
}

template <>
__device__ inline unsigned pack<BFloat16>(float first, float second) {
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
}
#endif

__device__ inline void unpack(unsigned both, float* values, BFloat16) {
  values[0] = __uint_as_float(both << 16);
  values[1] = __uint_as_float(both & 0xffff0000u);
}

__device__ inline void unpack(unsigned both, float* values, Half) {
  values[0] = to_float(Half{static_cast<unsigned short>(both)});
  values[1] = to_float(Half{static_cast<unsigned short>(both >> 16)});
}

// exp2 and 1 / x by the special-function unit: 2 and 1 units in the last place, no slow path.
__device__ inline float fast_exp2(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

__device__ inline float fast_reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// One store each: plain ones of a vector are split where the compiler unrolls a loop.
__device__ inline void store_whole(uint4* address, uint4 value) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ inline void store_whole(uint2* address, uint2 value) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};"
               :
               : "l"(address), "r"(value.x), "r"(value.y)
               : "memory");
}

__device__ inline void store_whole(unsigned* address, unsigned value) { *address = value; }

__device__ inline void store_whole(unsigned short* address, unsigned short value) {
  *address = value;
}

// Read what another block of this launch has written: the first-level cache may hold older data.
__device__ inline float load_coherent(const float* address) {
  return __ldcg(address);
}
