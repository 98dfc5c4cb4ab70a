// First kernel of the forward pass: the sums of this rank, ready to be added to the other ranks'.
//
// Sums are taken of x - shift and (x - shift)^2, where the shift is the first value of the channel:
// a large mean then costs no accuracy (Chan, Golub & LeVeque 1983, "Algorithms for computing the
// sample variance"). What is sent is [n*mean | M2 + n*mean^2 | n] in double, which ranks can add.
#pragma once

struct StatsArguments {
  Geometry geometry;
  Workspace workspace;
  const void* x;
  double* sums;  // [2 * channels + 1]
  double count;     // values per channel on this rank
};

template <typename T, Layout L, int V>
__device__ inline void stats(const StatsArguments& arguments) {
  constexpr int A = Position<L, V>::kChannels;
  constexpr int kInFlight = 4;
  extern __shared__ double shared_memory[];
  const Geometry& geometry = arguments.geometry;
  const T* __restrict__ x = static_cast<const T*>(arguments.x);
  Position<L, V> position(geometry);

  float shift[A] = {};
  if (position.channel < geometry.channels) {
    load<T, A>(x + position.channel * geometry.spatial).get(shift);
  }
  float sums[2 * A] = {};
  for_each_group<kInFlight>(position.count, [&](int valid) {
    Vector<T, V> vectors[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (j < valid) vectors[j] = load<T, V>(x + position.offset);
      position.advance(geometry);
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (j >= valid) break;
      float values[V];
      vectors[j].get(values);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const int a = A == 1 ? 0 : k;
        const float difference = values[k] - shift[a];
        sums[a] += difference;
        sums[A + a] += difference * difference;
      }
    }
  });

  double totals[2 * A];
  if (!sum_over_grid<A>(sums, totals, position.channel, geometry.channels, arguments.workspace,
                        shared_memory)) {
    return;
  }
  const double count = arguments.count;
  double* result = arguments.sums;
#pragma unroll
  for (int i = 0; i < A; ++i) {
    const double sum = totals[i];
    const double mean = shift[i] + sum / count;
    const double m2 = totals[A + i] - sum * sum / count;
    result[position.channel + i] = count * mean;
    result[geometry.channels + position.channel + i] = m2 + count * mean * mean;
  }
  if (position.channel == 0) result[2 * geometry.channels] = count;
}
