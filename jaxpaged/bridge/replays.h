// Launches that are repeated without Mosaic's launch function, through CUDA's public driver interface.
//
// Most of Mosaic's launch is encoding descriptors for TMA, which it hands over by value. They depend on the kernel and
// on its buffers' addresses alone: memory that was freed and given out again at the same address has the same ones, and
// kernels are never unloaded. So a launch that was seen before is captured once, on a stream where nothing runs, and
// what the driver got there is given to it again each time. Wherever something is unexpected, Mosaic's launch serves.

#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace jaxpaged {

using Numbers = std::vector<int64_t>;

struct Hash {
  size_t operator()(const Numbers& numbers) const {
    uint64_t hash = numbers.size();
    for (auto x : numbers) hash = (hash ^ static_cast<uint64_t>(x)) * 0x9E3779B97F4A7C15u;
    return hash ^ (hash >> 32);
  }
};

// As in cuda.h, which machines that only run kernels lack. Its handles are pointers, its enumerations and errors ints.

constexpr int NON_BLOCKING_STREAM = 1, NOT_CAPTURING = 0, RELAXED_CAPTURE = 2, KERNEL_NODE = 0, INVALID_VALUE = 1;
constexpr uint32_t COOPERATIVE = 2, CLUSTER_DIMENSION = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6;

struct NodeParameters {  // CUDA_KERNEL_NODE_PARAMS_v2
  void* function;
  uint32_t grid[3], block[3], shared_bytes;
  void **parameters, **extra;
  void *kernel, *context;
};
static_assert(sizeof(NodeParameters) == 72 && offsetof(NodeParameters, parameters) == 40);

union AttributeValue {  // CUlaunchAttributeValue
  uint32_t numbers[16];
  void* pointer;  // for the alignment
};

struct Attribute {  // CUlaunchAttribute
  uint32_t id, padding;
  AttributeValue value;
};
static_assert(sizeof(Attribute) == 72 && offsetof(Attribute, value) == 8);

struct LaunchConfig {  // CUlaunchConfig
  uint32_t grid[3], block[3], shared_bytes;
  void* stream;
  const Attribute* attributes;
  uint32_t num_attributes;
};
static_assert(sizeof(LaunchConfig) == 56 && offsetof(LaunchConfig, stream) == 32);

// The driver's functions, which return 0 where they succeed. On stream 0 those found by name use the legacy stream, as
// PyTorch and Mosaic do.
struct Driver {
  int (*exchange_capture_mode)(int* mode);
  int (*create_stream)(void** stream, uint32_t flags);
  int (*destroy_stream)(void* stream);
  int (*capturing)(void* stream, int* status);
  int (*begin_capture)(void* stream, int mode);
  int (*end_capture)(void* stream, void** graph);
  int (*destroy_graph)(void* graph);
  int (*nodes)(void* graph, void** nodes, size_t* count);
  int (*node_type)(void* node, int* type);
  int (*node_parameters)(void* node, NodeParameters* parameters);
  int (*node_attribute)(void* node, int id, AttributeValue* value);
  int (*parameter)(void* function, size_t index, size_t* offset, size_t* size);
  int (*launch)(const LaunchConfig* config, void* function, void** parameters, void** extra);

  // Or null, where one is missing, as `cuFuncGetParamInfo` is before CUDA 12.4; `find` tells addresses by name.
  template <class Find>
  static std::unique_ptr<const Driver> found(const Find& find) {
    auto driver = std::make_unique<Driver>();
    const std::pair<const char*, void*> functions[] = {
        {"cuThreadExchangeStreamCaptureMode", &driver->exchange_capture_mode},
        {"cuStreamCreate", &driver->create_stream},
        {"cuStreamDestroy_v2", &driver->destroy_stream},
        {"cuStreamIsCapturing", &driver->capturing},
        {"cuStreamBeginCapture_v2", &driver->begin_capture},
        {"cuStreamEndCapture", &driver->end_capture},
        {"cuGraphDestroy", &driver->destroy_graph},
        {"cuGraphGetNodes", &driver->nodes},
        {"cuGraphNodeGetType", &driver->node_type},
        {"cuGraphKernelNodeGetParams_v2", &driver->node_parameters},
        {"cuGraphKernelNodeGetAttribute", &driver->node_attribute},
        {"cuFuncGetParamInfo", &driver->parameter},
        {"cuLaunchKernelEx", &driver->launch},
    };
    static_assert(sizeof functions / sizeof functions[0] == sizeof(Driver) / sizeof(void*));
    for (auto [name, function] : functions) {
      const void* address = find(name);
      if (address == nullptr) return nullptr;
      std::memcpy(function, &address, sizeof address);
    }
    return driver;
  }

  static std::unique_ptr<const Driver> loaded() {
    auto library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) return nullptr;
    return found([&](const char* name) { return dlsym(library, name); });
  }
};

// That replays are made with and launched by; null where Mosaic launches all.
inline std::atomic<const Driver*> driver_in_use = nullptr;

// What the driver got in a launch, but for the stream. The stream's priority, which a captured kernel keeps, is left to
// the stream as well.
class Replay {
 public:
  // What a graph of one kernel launches, or null.
  static std::shared_ptr<const Replay> of(const Driver& driver, void* graph, bool early) {
    void* nodes[2];
    size_t count = 2;
    int type;
    if (driver.nodes(graph, nodes, &count) || count != 1) return nullptr;
    if (driver.node_type(nodes[0], &type) || type != KERNEL_NODE) return nullptr;
    auto replay = std::make_shared<Replay>();
    NodeParameters node{};
    if (driver.node_parameters(nodes[0], &node) || node.function == nullptr) return nullptr;
    if (!replay->copy_parameters(driver, node)) return nullptr;
    if (!replay->copy_attributes(driver, nodes[0], early)) return nullptr;
    replay->function_ = node.function;
    std::memcpy(replay->config_.grid, node.grid, sizeof node.grid);
    std::memcpy(replay->config_.block, node.block, sizeof node.block);
    replay->config_.shared_bytes = node.shared_bytes;
    return replay;
  }

  // From any number of threads: the driver copies all that it is given before it returns.
  bool launch(const Driver& driver, void* stream) const {
    auto config = config_;
    config.stream = stream;
    config.attributes = attributes_.data();
    return driver.launch(&config, function_, const_cast<void**>(parameters_.data()), nullptr) == 0;
  }

 private:
  // The node's own are gone with the graph. Their sizes are the function's to tell; it has no word for their number.
  bool copy_parameters(const Driver& driver, const NodeParameters& node) {
    constexpr size_t MOST_BYTES = 32764;  // that a kernel can take
    std::vector<size_t> offsets;
    if (node.parameters == nullptr) return false;
    for (;;) {
      size_t offset = 0, size = 0;
      const int error = driver.parameter(node.function, offsets.size(), &offset, &size);
      if (error == INVALID_VALUE) break;
      if (error || size == 0 || offset < bytes_.size() || offset + size > MOST_BYTES) return false;
      bytes_.resize(offset + size);
      std::memcpy(bytes_.data() + offset, node.parameters[offsets.size()], size);
      offsets.push_back(offset);
    }
    for (auto offset : offsets) parameters_.push_back(bytes_.data() + offset);
    return !parameters_.empty();
  }

  // Whether a kernel is launched early, its node doesn't tell: in a graph that is a matter of the edges.
  bool copy_attributes(const Driver& driver, void* node, bool early) {
    AttributeValue cooperative{}, cluster{}, yes{{1}};
    if (driver.node_attribute(node, COOPERATIVE, &cooperative) || cooperative.numbers[0]) return false;
    if (driver.node_attribute(node, CLUSTER_DIMENSION, &cluster)) return false;
    if (cluster.numbers[0]) attributes_.push_back({CLUSTER_DIMENSION, 0, cluster});
    if (early) attributes_.push_back({PROGRAMMATIC_STREAM_SERIALIZATION, 0, yes});
    config_.num_attributes = attributes_.size();
    return true;
  }

  void* function_ = nullptr;
  LaunchConfig config_{};
  std::vector<Attribute> attributes_;
  std::vector<char> bytes_;
  std::vector<void*> parameters_;  // into `bytes_`
};

// The graph of what `run` launches on the stream that it is given, where it isn't executed; or null.
//
// Captures are relaxed, as is this thread meanwhile. So nothing that this or another thread does, such as allocating
// memory, fails or spoils the capture; nor does making a stream spoil a capture of the engine's. The stream doesn't
// synchronize with stream 0, whose launches in other threads would be errors otherwise.
template <class Run>
void* captured(const Driver& driver, const Run& run) {
  int mode = RELAXED_CAPTURE;
  if (driver.exchange_capture_mode(&mode)) return nullptr;
  void *stream = nullptr, *graph = nullptr;
  if (driver.create_stream(&stream, NON_BLOCKING_STREAM) == 0) {
    if (driver.begin_capture(stream, RELAXED_CAPTURE) == 0) {
      run(stream);
      if (driver.end_capture(stream, &graph)) graph = nullptr;
    }
    driver.destroy_stream(stream);
  }
  driver.exchange_capture_mode(&mode);
  return graph;
}

// The launches that were seen twice, of any number of kernels.
class Replays {
 public:
  static constexpr size_t MOST = 4096;

  // Launch a kernel on a stream.
  //
  // key: names the kernel, the device and all addresses.
  // early: whether it may start before the one in front of it has ended (programmatic dependent launch).
  // run: launches it with Mosaic's function, on the stream it is given.
  template <class Run>
  void launch(const Numbers& key, bool early, void* stream, const Run& run) {
    auto driver = driver_in_use.load(std::memory_order_acquire);
    if (driver == nullptr || !replayed(*driver, key, early, stream, run)) run(stream);
  }

  void forget() {
    std::unique_lock lock(mutex_);
    known_.clear();
    seen_.clear();
  }

 private:
  using Entry = std::shared_ptr<const Replay>;  // null for what stays with Mosaic

  template <class Run>
  bool replayed(const Driver& driver, const Numbers& key, bool early, void* stream, const Run& run) {
    Entry replay;
    if (!find(key, replay)) {
      int status;
      // The first launch may load the kernel, which isn't to be captured; and most addresses may never come again.
      if (!seen_before(key)) return false;
      if (driver.capturing(stream, &status) || status != NOT_CAPTURING) return false;
      if (auto graph = captured(driver, run)) {
        replay = Replay::of(driver, graph, early);
        driver.destroy_graph(graph);
      }
      keep(key, replay);
    }
    if (replay == nullptr) return false;
    if (replay->launch(driver, stream)) return true;
    keep(key, nullptr);
    return false;
  }

  bool find(const Numbers& key, Entry& replay) const {
    std::shared_lock lock(mutex_);
    auto found = known_.find(key);
    if (found == known_.end()) return false;
    replay = found->second;
    return true;
  }

  // By the hash alone: were two the same, one launch would be captured a call early.
  bool seen_before(const Numbers& key) {
    const auto hash = Hash()(key);
    std::unique_lock lock(mutex_);
    if (seen_.count(hash)) return true;
    if (seen_.size() >= MOST) seen_.clear();
    seen_.insert(hash);
    return false;
  }

  void keep(const Numbers& key, Entry replay) {
    std::unique_lock lock(mutex_);
    if (known_.size() >= MOST) known_.clear();
    known_.insert_or_assign(key, std::move(replay));
    seen_.erase(Hash()(key));
  }

  mutable std::shared_mutex mutex_;
  std::unordered_map<Numbers, Entry, Hash> known_;
  std::unordered_set<size_t> seen_;
};

}  // namespace jaxpaged
