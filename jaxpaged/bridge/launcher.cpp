// Operators of PyTorch that launch kernels without Python: see native.py.
//
// An operator calls its Python function for tensors that it has not seen the like of. That function then says what it
// launched, and for tensors alike the operator launches the same on their memory. Likeness is equality of all that
// kernels are compiled for: every number and string, and each tensor's dtype, device, sizes and strides. Python may call
// an operator without PyTorch's dispatcher, too.

#include <pthread.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <string>
#include <string_view>
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

thread_local bool prepared = false;  // by Python, which makes the device's context current in this thread

constexpr int64_t NONE = -1;

bool add(Likeness& likeness, const at::Tensor& x) {
  if (x.requires_grad()) return false;  // whether it is refused depends on the thread's mode
  auto device = (x.device().index() + 1) << 8 | static_cast<int64_t>(x.device().type());
  likeness.push_back(device << 32 | x.dim() << 16 | static_cast<int64_t>(x.scalar_type()));
  likeness.insert(likeness.end(), x.sizes().begin(), x.sizes().end());
  likeness.insert(likeness.end(), x.strides().begin(), x.strides().end());
  return true;
}

void add(Likeness& likeness, double number) {
  int64_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  likeness.push_back(bits);
}

void add(Likeness& likeness, std::string_view text) {
  likeness.push_back(text.size());
  likeness.insert(likeness.end(), text.begin(), text.end());
}

bool add(Likeness& likeness, const c10::IValue& value) {
  if (value.isTensor()) return add(likeness, value.toTensor());
  if (value.isNone()) {
    likeness.push_back(NONE);
  } else if (value.isInt()) {
    likeness.push_back(value.toInt());
  } else if (value.isBool()) {
    likeness.push_back(value.toBool());
  } else if (value.isDouble()) {
    add(likeness, value.toDouble());
  } else if (value.isString()) {
    add(likeness, std::string_view(value.toStringRef()));
  } else {
    return false;
  }
  return true;
}

bool add(Likeness& likeness, PyObject* value) {
  if (THPVariable_Check(value)) return add(likeness, THPVariable_Unpack(value));
  if (value == Py_None) {
    likeness.push_back(NONE);
  } else if (PyBool_Check(value)) {
    likeness.push_back(value == Py_True);
  } else if (PyFloat_Check(value)) {
    add(likeness, PyFloat_AS_DOUBLE(value));
  } else if (PyLong_Check(value)) {
    int overflow;
    likeness.push_back(PyLong_AsLongLongAndOverflow(value, &overflow));
    return !overflow;
  } else if (PyUnicode_Check(value)) {
    Py_ssize_t size;
    auto text = PyUnicode_AsUTF8AndSize(value, &size);
    if (text == nullptr) throw py::error_already_set();
    add(likeness, std::string_view(text, size));
  } else {
    return false;
  }
  return true;
}

const void* memory_of(const c10::IValue& value) { return value.toTensor().data_ptr(); }
const void* memory_of(PyObject* value) { return THPVariable_Unpack(value).data_ptr(); }

class Operator : public c10::OperatorKernel {
 public:
  Operator(Device device, py::function function, py::function launches)
      // Never released: PyTorch may drop an operator when there is no Python any more.
      : device_(device), function_(function.release()), launches_(launches.release()) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const auto count = op.schema().arguments().size();
    const auto arguments = torch::jit::last(*stack, count);
    if (!launched(arguments.begin(), count, count)) {
      py::gil_scoped_acquire gil;
      try {
        py::tuple values(count);
        for (size_t i = 0; i < count; i++) values[i] = torch::jit::toPyObject(arguments[i]);
        call_and_remember(values, values);
      } catch (py::error_already_set& error) {
        error.restore();
        python_error raised;
        raised.persist();
        throw raised;
      }
    }
    torch::jit::drop(*stack, count);
  }

  // The same of Python's arguments, by position; those left out at the end are None.
  void call(PyObject* const* arguments, size_t given, size_t count) {
    if (launched(arguments, given, count)) return;
    py::tuple values(given), all(std::max(given, count));
    for (size_t i = 0; i < all.size(); i++) {
      py::object value = i < given ? py::reinterpret_borrow<py::object>(arguments[i]) : py::none();
      if (i < given) values[i] = value;
      all[i] = std::move(value);
    }
    call_and_remember(values, all);
  }

  void forget() {
    std::unique_lock lock(mutex_);
    known_.clear();
    replays_.forget();
  }

 private:
  // Whether a call was like an earlier one, and launched. If not, `last_likeness` is its own, or empty if it has none.
  template <class Value>
  bool launched(const Value* arguments, size_t given, size_t count) {
    auto& likeness = last_likeness();
    likeness.clear();
    for (size_t i = 0; i < given; i++) {
      if (add(likeness, arguments[i])) continue;
      likeness.clear();
      return false;
    }
    for (auto i = given; i < count; i++) likeness.push_back(NONE);
    return prepared && !stopped && launched_as(likeness, arguments);
  }

  static Likeness& last_likeness() {
    thread_local Likeness likeness;
    return likeness;
  }

  template <class Value>
  bool launched_as(const Likeness& likeness, const Value* arguments) {
    int32_t current;
    void* stream;
    std::shared_lock lock(mutex_);
    auto found = known_.find(likeness);
    if (found == known_.end()) return false;
    const auto& launches = found->second;
    if (device_.current(&current) || current != launches.device) return false;
    auto address = [&](int64_t argument) { return reinterpret_cast<uintptr_t>(memory_of(arguments[argument])); };
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

  // Call Python with the arguments that were given, and ask what that launched with all of them.
  void call_and_remember(const py::tuple& given, const py::tuple& all) {
    auto likeness = last_likeness();  // a copy: Python may call operators
    function_(*given);
    prepared = true;
    if (likeness.empty()) return;
    auto launches = launches_(*all);
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
      : library_(torch::Library::IMPL, name_space, c10::parseDispatchKey(key), __FILE__, __LINE__),
        num_arguments_(c10::Dispatcher::singleton()
                           .findSchemaOrThrow((name_space + "::" + name).c_str(), "")
                           .schema()
                           .arguments()
                           .size()) {
    auto kernel = std::make_unique<Operator>(device, std::move(function), std::move(launches));
    operator_ = kernel.get();
    library_.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
  }

  void forget() { operator_->forget(); }

  // A function that takes the operator's arguments by position; PyTorch's dispatcher knows nothing of it.
  static py::object call(const py::object& served) {
    static PyMethodDef method = {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_served)),
                                 METH_FASTCALL, "Launch what an operator does."};
    auto held = new Held{served, served.cast<Served*>()};
    py::capsule self(held, [](void* pointer) { delete static_cast<Held*>(pointer); });
    return py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
  }

 private:
  struct Held {  // by such a function, as long as it lives
    py::object object;
    Served* served;
  };

  static PyObject* call_served(PyObject* self, PyObject* const* arguments, Py_ssize_t given) {
    HANDLE_TH_ERRORS
    auto served = static_cast<Held*>(PyCapsule_GetPointer(self, nullptr))->served;
    served->operator_->call(arguments, given, served->num_arguments_);
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
  }

  torch::Library library_;
  size_t num_arguments_;
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
      .def_property_readonly("call", &Served::call)
      .def("forget", &Served::forget, py::call_guard<py::gil_scoped_release>());
  pthread_atfork(nullptr, nullptr, [] { stopped = true; });
}
