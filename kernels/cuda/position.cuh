// Which elements a thread reads: the two memory layouts as one walk over vectors.
//
// The grid is (channel tiles, splits). All elements of a channel are divided among the splits of
// its tile and, within a block, among threadIdx.y; threadIdx.x runs over the channels of a tile.
//   channels last   [rows, channels]: a vector holds V channels of one row; a thread keeps its
//                   channels and walks down the rows.
//   channels first  [images, channels, spatial]: a vector holds V positions of one channel; a tile
//                   is one channel (blockDim.x is 1), whose vectors of all images are numbered
//                   consecutively.
#pragma once

enum Layout { kChannelsFirst, kChannelsLast };

// Computed on the host (`kernels/geometry.py`), so that no thread divides.
struct Geometry {
  long long channels;
  long long image;          // elements of one image, or of one row
  long long spatial;        // elements of one channel in one image; 1 for channels last
  long long step;           // elements from a thread's vector to its next one ...
  long long wrap;           // ... and more of them where that one lies in another image
  int spatial_vectors;      // vectors of one channel in one image
  int spatial_step;         // vectors by which a step moves within an image
  int iterations;           // vectors of every thread ...
  int remainder;            // ... and one more for as many threads
};

template <Layout L, int V>
struct Position {
  static constexpr int kChannels = L == kChannelsLast ? V : 1;  // channels of one thread

  long long channel;  // the first one
  long long offset;   // of the next vector, in elements
  int count;          // vectors of this thread
  int within;         // index of the next vector in its image; channels first only

  __device__ explicit Position(const Geometry& geometry) {
    const int first = blockIdx.y * blockDim.y + threadIdx.y;
    count = geometry.iterations + (first < geometry.remainder ? 1 : 0);
    if constexpr (L == kChannelsLast) {
      channel = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * V;
      offset = first * geometry.image + channel;
      within = 0;
      if (channel >= geometry.channels) count = 0;
    } else {
      channel = blockIdx.x;
      const int image = first / geometry.spatial_vectors;
      within = first - image * geometry.spatial_vectors;
      offset = image * geometry.image + channel * geometry.spatial +
               static_cast<long long>(within) * V;
    }
  }

  __device__ void advance(const Geometry& geometry) {
    offset += geometry.step;
    if constexpr (L == kChannelsFirst) {
      within += geometry.spatial_step;
      if (within >= geometry.spatial_vectors) {
        within -= geometry.spatial_vectors;
        offset += geometry.wrap;
      }
    }
  }
};

// Call `group(valid)` for every kSize vectors of a thread, and once for the rest. Where `valid` is
// the constant kSize its tests disappear, and the group's loads stand together before their first use.
template <int kSize, typename Group>
__device__ inline void for_each_group(int count, Group group) {
  for (; count >= kSize; count -= kSize) group(kSize);
  if (count > 0) group(count);
}
