// First kernel of the backward pass: sum_dy and sum_dy * xhat per channel, xhat = (x - mean) * invstd.
//
// dy is the gradient before the activation: the activation's input is computed again from x. The
// same sums, before they are added to the other ranks', are the gradients of bias and weight.
#pragma once

struct BackwardReduceArguments {
  Geometry geometry;
  Workspace workspace;
  const void* grad_output;
  const void* x;
  const void* residual;
  const double* statistics;  // [2 * channels + 1]: mean, invstd, count of the batch of all ranks
  Affine affine;
  float* sums;        // [2 * channels]: sum_dy, sum_dy_xhat of this rank
  void* grad_weight;  // null where it is not wanted
  void* grad_bias;
  float negative_slope;
  int parameter_type;
};

template <typename T, Layout L, int V, Activation F, bool kResidual>
__device__ inline void backward_reduce(const BackwardReduceArguments& arguments) {
  constexpr int A = Position<L, V>::kChannels;
  constexpr int kInFlight = 2;
  extern __shared__ double shared_memory[];
  const Geometry& geometry = arguments.geometry;
  const T* __restrict__ grad_output = static_cast<const T*>(arguments.grad_output);
  const T* __restrict__ x = static_cast<const T*>(arguments.x);
  const T* __restrict__ residual = static_cast<const T*>(arguments.residual);
  Position<L, V> position(geometry);

  const long long channels = geometry.channels;
  const double* statistics = arguments.statistics;
  const Constants constants{reinterpret_cast<float*>(shared_memory),
                            static_cast<int>(blockDim.x) * A};
  constants.fill(channels, [&](int i, long long channel) {
    const float mean = static_cast<float>(statistics[channel]);
    constants.set(0, i, mean);
    if constexpr (F != kNone) {
      const double scale = weight_of(arguments.affine, arguments.parameter_type, channel) *
                           statistics[channels + channel];
      constants.set(1, i, kUnit<F> * scale);
      constants.set(2, i,
                    kUnit<F> * (bias_of(arguments.affine, arguments.parameter_type, channel) -
                                (statistics[channel] - mean) * scale));
    }
  });
  float mean[A], scale[A], shift[A];
  constants.get(0, mean);
  if constexpr (F != kNone) {
    constants.get(1, scale);
    constants.get(2, shift);
  }
  __syncthreads();

  float sums[2 * A] = {};
  for_each_group<kInFlight>(position.count, [&](int valid) {
    Vector<T, V> gradients[kInFlight];
    Vector<T, V> vectors[kInFlight];
    Vector<T, V> residuals[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
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
        float grad = grads[k];
        if constexpr (F != kNone) {
          float t = fmaf(centered, scale[a], shift[a]);
          if constexpr (kResidual) t = fmaf(added[k], static_cast<float>(kUnit<F>), t);
          grad = activation_gradient<F>(grad, t, arguments.negative_slope);
        }
        sums[a] += grad;
        sums[A + a] += grad * centered;
      }
    }
  });

  double totals[2 * A];
  if (!sum_over_grid<A>(sums, totals, position.channel, channels, arguments.workspace,
                        shared_memory)) {
    return;
  }
#pragma unroll
  for (int i = 0; i < A; ++i) {
    const long long channel = position.channel + i;
    const double sum_dy = kUnit<F> * totals[i];
    const double sum_dy_xhat = (kUnit<F> * totals[A + i] - (statistics[channel] - mean[i]) * sum_dy) *
                               statistics[channels + channel];
    arguments.sums[channel] = static_cast<float>(sum_dy);
    arguments.sums[channels + channel] = static_cast<float>(sum_dy_xhat);
    const int type = arguments.parameter_type;
    if (arguments.grad_weight) write(arguments.grad_weight, type, channel, sum_dy_xhat);
    if (arguments.grad_bias) write(arguments.grad_bias, type, channel, sum_dy);
  }
}
