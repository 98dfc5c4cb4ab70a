// Vectors of elements: one aligned memory access of up to 16 bytes, arithmetic in fp32.
#pragma once

// V neighbouring elements as they lie in memory.
template <typename T, int V, bool kPairs = sizeof(T) == 2 && V % 2 == 0>
struct alignas(sizeof(T) * V) Vector {
  T elements[V];

  __device__ void get(float (&values)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = to_float(elements[i]);
  }

  __device__ void set(const float (&values)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) round_to(values[i], &elements[i]);
  }
};

// Two-byte elements are kept in pairs, as they fill registers.
template <typename T, int V>
struct alignas(sizeof(T) * V) Vector<T, V, true> {
  unsigned pairs[V / 2];

  __device__ void get(float (&values)[V]) const {
#pragma unroll
    for (int i = 0; i < V; i += 2) unpack(pairs[i / 2], &values[i], T{});
  }

  __device__ void set(const float (&values)[V]) {
#pragma unroll
    for (int i = 0; i < V; i += 2) pairs[i / 2] = pack<T>(values[i], values[i + 1]);
  }
};

// The built-in type of a size. The compiler moves these in one access; a structure it may split.
template <int kBytes>
struct Word;
template <>
struct Word<16> {
  using Type = uint4;
};
template <>
struct Word<8> {
  using Type = uint2;
};
template <>
struct Word<4> {
  using Type = unsigned;
};
template <>
struct Word<2> {
  using Type = unsigned short;
};

template <typename T, int V>
__device__ inline Vector<T, V> load(const T* address) {
  using Type = typename Word<sizeof(T) * V>::Type;
  Vector<T, V> vector;
  *reinterpret_cast<Type*>(&vector) = *reinterpret_cast<const Type*>(address);
  return vector;
}

template <typename T, int V>
__device__ inline void store(T* address, const float (&values)[V]) {
  using Type = typename Word<sizeof(T) * V>::Type;
  Vector<T, V> vector;
  vector.set(values);
  store_whole(reinterpret_cast<Type*>(address), *reinterpret_cast<const Type*>(&vector));
}
