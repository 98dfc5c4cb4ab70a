// Last kernel of the backward pass: the gradient of x,
//   dx = weight * invstd * (dy - sum_dy / n - xhat * sum_dy_xhat / n),
// with the sums over all ranks and dy the gradient before the activation (Ioffe & Szegedy 2015,
// "Batch normalization", section 3). dy itself is the gradient of the residual.
#pragma once

struct BackwardInputArguments {
  Geometry geometry;
  const void* grad_output;
  const void* x;
  const void* residual;
  void* grad_x;
  void* grad_residual;
  const double* statistics;  // [2 * channels + 1]: mean, invstd, count of the batch of all ranks
  Affine affine;
  const float* sums;  // [2 * channels] over all ranks: sum_dy, then sum_dy_xhat
  float negative_slope;
  int parameter_type;
};

template <typename T, Layout L, int V, Activation F, bool kResidual>
__device__ inline void backward_input(const BackwardInputArguments& arguments) {
  constexpr int A = Position<L, V>::kChannels;
  constexpr int kInFlight = 2;
  extern __shared__ double shared_memory[];
  const Geometry& geometry = arguments.geometry;
  const T* __restrict__ grad_output = static_cast<const T*>(arguments.grad_output);
  const T* __restrict__ x = static_cast<const T*>(arguments.x);
  const T* __restrict__ residual = static_cast<const T*>(arguments.residual);
  T* __restrict__ grad_x = static_cast<T*>(arguments.grad_x);
  T* __restrict__ grad_residual = static_cast<T*>(arguments.grad_residual);
  Position<L, V> position(geometry);

  const long long channels = geometry.channels;
  const double* statistics = arguments.statistics;
  const Constants constants{reinterpret_cast<float*>(shared_memory),
                            static_cast<int>(blockDim.x) * A};
  constants.fill(channels, [&](int i, long long channel) {
    const double invstd = statistics[channels + channel];
    const double count = statistics[2 * channels];
    const float mean = static_cast<float>(statistics[channel]);
    const double remainder = statistics[channel] - mean;
    const double scale = weight_of(arguments.affine, arguments.parameter_type, channel) * invstd;
    const double slope = -scale * invstd * arguments.sums[channels + channel] / count;
    constants.set(0, i, mean);
    constants.set(1, i, kUnit<F> * scale);
    constants.set(2, i, slope);
    constants.set(3, i, -scale * arguments.sums[channel] / count - slope * remainder);
    if constexpr (F != kNone) {
      constants.set(4, i,
                    kUnit<F> * (bias_of(arguments.affine, arguments.parameter_type, channel) -
                                remainder * scale));
    }
  });
  float mean[A], scale[A], slope[A], offset[A], shift[A];
  constants.get(0, mean);
  constants.get(1, scale);
  constants.get(2, slope);
  constants.get(3, offset);
  if constexpr (F != kNone) constants.get(4, shift);

  for_each_group<kInFlight>(position.count, [&](int valid) {
    Vector<T, V> gradients[kInFlight];
    Vector<T, V> vectors[kInFlight];
    Vector<T, V> residuals[kInFlight];
    long long offsets[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      offsets[j] = position.offset;
      if (j < valid) {
        gradients[j] = load<T, V>(grad_output + position.offset);
        vectors[j] = load<T, V>(x + position.offset);
        if constexpr (kResidual) residuals[j] = load<T, V>(residual + position.offset);
      }
      position.advance(geometry);
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (j >= valid) break;
      float grads[V], values[V], added[V] = {};
      gradients[j].get(grads);
      vectors[j].get(values);
      if constexpr (kResidual) residuals[j].get(added);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const int a = A == 1 ? 0 : k;
        const float centered = values[k] - mean[a];
        if constexpr (F != kNone) {
          float t = fmaf(centered, scale[a], shift[a]);
          if constexpr (kResidual) t = fmaf(added[k], static_cast<float>(kUnit<F>), t);
          grads[k] = activation_gradient<F>(grads[k], t, arguments.negative_slope);
        }
        values[k] = fmaf(scale[a], grads[k], fmaf(slope[a], centered, offset[a]));
        if constexpr (kResidual) grads[k] *= static_cast<float>(kUnit<F>);
      }
      store<T, V>(grad_x + offsets[j], values);
      if constexpr (kResidual) store<T, V>(grad_residual + offsets[j], grads);
    }
  });
}
