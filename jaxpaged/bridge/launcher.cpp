// Operators of PyTorch that launch kernels without Python: see native.py.
//
// An operator calls its Python function for tensors that it has not seen the like of. That function then says what it
// launched, and for tensors alike the operator launches the same on their memory. Likeness is equality of all that
// kernels are compiled for: every number and string, and each tensor's dtype, device, sizes and strides.

#include <pthread.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "replays.h"

namespace py = pybind11;

namespace {

using jaxpaged::Driver, jaxpaged::Hash, jaxpaged::Numbers;
using Likeness = Numbers;

// Where a kernel's buffer lies: some bytes behind the start of an argument, or where the argument is -1, at an address.
using Buffer = std::pair<int64_t, int64_t>;

// Mosaic's launch function, and what it takes besides a stream and buffers; see mosaic_abi.py.
struct Kernel {
  uintptr_t launch, function, kernel;
  std::vector<Buffer> buffers;
  bool early;

  void run(void* stream, void** addresses, int32_t device) const {
    auto pointer = reinterpret_cast<void*>(function);
    if (kernel == 0) {
      reinterpret_cast<void (*)(void*, void*, void**)>(launch)(pointer, stream, addresses);
    } else {
      auto run = reinterpret_cast<void (*)(void*, void*, void*, void**, int32_t)>(launch);
      run(reinterpret_cast<void*>(kernel), pointer, stream, addresses, device);
    }
  }
};

struct Launches {
  std::vector<Kernel> kernels;
  int32_t device;
  std::vector<int64_t> aligned;  // arguments that must start at a multiple of `alignment`
  int64_t alignment;
  std::optional<std::tuple<int64_t, int64_t, int64_t>> apart;  // two arguments, and how many bytes lie between them
};

// Functions of PyTorch's stable C interface, by address; they return 0 where they succeed.
struct Device {
  int32_t (*current)(int32_t* device);
  int32_t (*stream)(int32_t device, void** stream);
};

std::atomic<bool> stopped = false;  // in a child of a fork, where neither CUDA nor the operators' locks can be used

bool add(Likeness& likeness, const c10::IValue& value) {
  if (value.isNone()) {
    likeness.push_back(-1);
  } else if (value.isTensor()) {
    const auto& x = value.toTensor();
    if (x.requires_grad()) return false;  // whether it is refused depends on the thread's mode
    auto device = (x.device().index() + 1) << 8 | static_cast<int64_t>(x.device().type());
    likeness.push_back(device << 32 | x.dim() << 16 | static_cast<int64_t>(x.scalar_type()));
    likeness.insert(likeness.end(), x.sizes().begin(), x.sizes().end());
    likeness.insert(likeness.end(), x.strides().begin(), x.strides().end());
  } else if (value.isInt()) {
    likeness.push_back(value.toInt());
  } else if (value.isBool()) {
    likeness.push_back(value.toBool());
  } else if (value.isDouble()) {
    auto number = value.toDouble();
    int64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    likeness.push_back(bits);
  } else if (value.isString()) {
    const auto& text = value.toStringRef();
    likeness.push_back(text.size());
    likeness.insert(likeness.end(), text.begin(), text.end());
  } else {
    return false;
  }
  return true;
}

class Operator : public c10::OperatorKernel {
 public:
  Operator(Device device, py::function function, py::function launches)
      // Never released: PyTorch may drop an operator when there is no Python any more.
      : device_(device), function_(function.release()), launches_(launches.release()) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const auto count = op.schema().arguments().size();
    const auto arguments = torch::jit::last(*stack, count);
    thread_local bool prepared = false;  // by Python, which makes the device's context current in this thread
    thread_local Likeness likeness;
    likeness.clear();
    bool comparable = true;
    for (const auto& x : arguments) comparable = comparable && add(likeness, x);
    if (!(prepared && comparable && !stopped && launched(likeness, arguments))) {
      py::gil_scoped_acquire gil;
      try {
        call_and_remember(comparable ? likeness : Likeness(), arguments);
      } catch (py::error_already_set& error) {
        error.restore();
        python_error raised;
        raised.persist();
        throw raised;
      }
      prepared = true;
    }
    torch::jit::drop(*stack, count);
  }

  void forget() {
    std::unique_lock lock(mutex_);
    known_.clear();
    replays_.forget();
  }

 private:
  bool launched(const Likeness& likeness, c10::ArrayRef<c10::IValue> arguments) {
    int32_t current;
    void* stream;
    std::shared_lock lock(mutex_);
    auto found = known_.find(likeness);
    if (found == known_.end()) return false;
    const auto& launches = found->second;
    if (device_.current(&current) || current != launches.device) return false;
    auto address = [&](int64_t argument) {
      return reinterpret_cast<uintptr_t>(arguments[argument].toTensor().data_ptr());
    };
    for (auto argument : launches.aligned) {
      if (address(argument) % launches.alignment) return false;
    }
    if (launches.apart) {
      auto [first, second, bytes] = *launches.apart;
      if (static_cast<int64_t>(address(second) - address(first)) != bytes) return false;
    }
    if (device_.stream(current, &stream)) return false;
    thread_local std::vector<void*> addresses;
    thread_local Numbers key;
    for (const auto& kernel : launches.kernels) {
      addresses.clear();
      key.clear();
      for (auto x : {kernel.launch, kernel.function, kernel.kernel}) key.push_back(x);
      key.push_back(current);
      for (auto [argument, offset] : kernel.buffers) {
        auto start = argument < 0 ? 0 : address(argument);
        addresses.push_back(reinterpret_cast<void*>(start + offset));
        key.push_back(start + offset);
      }
      replays_.launch(key, kernel.early, stream, [&](void* on) { kernel.run(on, addresses.data(), current); });
    }
    return true;
  }

  void call_and_remember(Likeness likeness, c10::ArrayRef<c10::IValue> values) {
    py::tuple arguments(values.size());
    for (size_t i = 0; i < values.size(); i++) arguments[i] = torch::jit::toPyObject(values[i]);
    function_(*arguments);
    if (likeness.empty()) return;
    auto launches = launches_(*arguments);
    if (launches.is_none()) return;
    Launches found;
    for (py::handle kernel : launches.attr("kernels")) {
      auto [launch, function, pointer] =
          kernel.attr("pointers").cast<std::tuple<uintptr_t, uintptr_t, uintptr_t>>();
      auto buffers = kernel.attr("buffers").cast<std::vector<Buffer>>();
      found.kernels.push_back({launch, function, pointer, std::move(buffers), kernel.attr("early").cast<bool>()});
    }
    found.device = launches.attr("device").cast<int32_t>();
    found.aligned = launches.attr("aligned").cast<std::vector<int64_t>>();
    found.alignment = launches.attr("alignment").cast<int64_t>();
    found.apart = launches.attr("apart").cast<decltype(found.apart)>();
    py::gil_scoped_release no_gil;  // a thread that launches may hold the lock while a kernel's launch waits for Python
    std::unique_lock lock(mutex_);
    known_.insert_or_assign(std::move(likeness), std::move(found));
  }

  Device device_;
  py::handle function_, launches_;
  std::shared_mutex mutex_;
  std::unordered_map<Likeness, Launches, Hash> known_;
  jaxpaged::Replays replays_;
};

// An operator's kernel for one dispatch key, as long as this lives.
class Served {
 public:
  Served(const std::string& name_space, const std::string& name, const std::string& key, Device device,
         py::function function, py::function launches)
      : library_(torch::Library::IMPL, name_space, c10::parseDispatchKey(key), __FILE__, __LINE__) {
    auto kernel = std::make_unique<Operator>(device, std::move(function), std::move(launches));
    operator_ = kernel.get();
    library_.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
  }

  void forget() { operator_->forget(); }

 private:
  torch::Library library_;
  Operator* operator_;  // the library's
};

// The driver's functions by name, for tests; without, CUDA's own where there is one. The one before is not released, as
// another thread may be launching with it.
void use_driver(const std::optional<std::unordered_map<std::string, uintptr_t>>& addresses) {
  auto find = [&](const char* name) {
    auto found = addresses->find(name);
    return found == addresses->end() ? nullptr : reinterpret_cast<void*>(found->second);
  };
  auto driver = addresses ? Driver::found(find) : Driver::loaded();
  jaxpaged::driver_in_use.store(driver.release(), std::memory_order_release);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  use_driver(std::nullopt);
  module.def("use_driver", &use_driver);
  py::class_<Served>(module, "Served")
      .def(py::init([](const std::string& name_space, const std::string& name, const std::string& key,
                       uintptr_t current_device, uintptr_t current_stream, py::function function,
                       py::function launches) {
        Device device{reinterpret_cast<decltype(Device::current)>(current_device),
                      reinterpret_cast<decltype(Device::stream)>(current_stream)};
        return std::make_unique<Served>(name_space, name, key, device, std::move(function), std::move(launches));
      }))
      .def("forget", &Served::forget, py::call_guard<py::gil_scoped_release>());
  pthread_atfork(nullptr, nullptr, [] { stopped = true; });
}
