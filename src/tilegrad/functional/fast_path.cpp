// Runs eager calls of attention whose signature is registered, from Python's arguments to the kernel and back through autograd,
// without Python. At the first call of a signature, call.py checks the call, selects and prepares its kernel, and registers the
// prepared kernel here as a program. For a call that has no program, or that is traced or transformed, `attend` returns None,
// and dispatch.py runs the call.
//
//   Call      the arguments of a call besides q, k and v: its mask, the requested kernel, the table of kernels
//   Program   one signature in one direction: the tensors that it allocates, and how its kernel is launched
//               native   a function of the CPU library, called with one structure into which addresses are written
//               plan     functions of the CUDA driver, which Python (kernels/cuda_launch.py) binds to addresses and a stream; the
//                        bound functions are cached
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pthread.h>

#include <cstdlib>
#include <mutex>
#include <unordered_map>

namespace {

namespace py = pybind11;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Words = std::vector<int64_t>;

constexpr int64_t ALIGNED_BYTES = 16, LINE_BYTES = 64;

struct Hash {
    size_t operator()(const Words& words) const {
        uint64_t hash = 1469598103934665603u;
        for (int64_t word : words) hash = (hash ^ uint64_t(word)) * 1099511628211u, hash ^= hash >> 29;
        return hash;
    }
};

// A Python object that any thread may release.
struct Kept {
    PyObject* const object;
    explicit Kept(py::handle x) : object(x.inc_ref().ptr()) {}
    Kept(const Kept&) = delete;
    ~Kept() {
        if (!Py_IsInitialized()) return;
        py::gil_scoped_acquire held;
        Py_DECREF(object);
    }
    py::object get() const { return py::reinterpret_borrow<py::object>(object); }
};

struct Call : torch::CustomClassHolder {
    const Kept mask, kernel, table;  // the mask is interned and has no tensors
    const bool deterministic;
    const Words key;
    Call(py::handle mask, py::handle kernel, py::handle table, bool deterministic, Words key)
        : mask(mask), kernel(kernel), table(table), deterministic(deterministic), key(std::move(key)) {}
};
using CallPtr = c10::intrusive_ptr<Call>;

struct Form {
    Words sizes, strides;
    at::TensorOptions options;
    explicit Form(const Tensor& x) : sizes(x.sizes().vec()), strides(x.strides().vec()), options(x.options().requires_grad(false)) {}
    Tensor make() const { return at::empty_strided(sizes, strides, options); }
};

struct Launch {
    int (*function)(uint64_t, uint64_t, uint64_t, uint64_t);
    uint64_t arguments[4];
};

struct Bound {  // launches of a plan at fixed addresses, and the memory that they point to
    std::vector<Launch> launches;
    const Kept memory;
};

struct Program {
    std::vector<Form> outputs;
    int64_t work_bytes = 0;
    at::TensorOptions work_options;
    // for a native program
    void (*native)(const void*, int64_t) = nullptr;
    int64_t direction = 0, scratch_at = 0;
    std::vector<uint64_t> words;
    std::vector<int64_t> places;
    std::string isa;
    // for a plan of launches
    std::unique_ptr<const Kept> plan;
    c10::Device device{c10::kCPU};
    int64_t number = 0;  // unique

    std::shared_ptr<Bound> bind(Words key) const;
    void run(const std::vector<Tensor>& tensors) const;
};

template <class Value>
using Under = std::unordered_map<Words, Value, Hash>;
// never destroyed, because at exit no interpreter is left to release objects
auto& calls = *new Under<CallPtr>;  // read under the GIL; entries stay, because autograd nodes and program keys have their addresses
std::mutex mutex;                   // guards both maps below; a thread that has locked it never waits for the GIL
auto& programs = *new Under<std::shared_ptr<Program>>;
auto& bound = *new Under<std::shared_ptr<Bound>>;
PyObject *parameter_class = nullptr, *slow_backward = nullptr;
size_t most_entries = 0;  // as in kernels/cache.py, a full map is cleared
constexpr size_t MOST_CALLS = 32;  // at most MOST_CALLS · most_entries calls; calls with other masks run in Python

const char* requested_isa() {
    const char* isa = std::getenv("TILEGRAD_ISA");
    return isa ? isa : "";
}

// Runs body under the GIL. A Python error becomes a C++ exception that can cross autograd's threads.
template <class F>
auto with_python(F body) {
    py::gil_scoped_acquire held;
    try {
        return body();
    } catch (py::error_already_set& error) {
        error.restore();
        python_error kept;
        kept.persist();
        throw kept;
    }
}

std::shared_ptr<Bound> Program::bind(Words key) const {
    return with_python([&] {
        py::list addresses;
        for (size_t i = 2; i < key.size(); i++) addresses.append(uint64_t(key[i]));
        py::tuple answer = plan->get().attr("numbers")(uint64_t(key[1]), addresses);
        std::vector<Launch> launches;
        for (auto each : answer[0]) {
            auto n = each.cast<std::vector<uint64_t>>();
            launches.push_back({reinterpret_cast<decltype(Launch::function)>(n.at(0)), {n.at(1), n.at(2), n.at(3), n.at(4)}});
        }
        std::shared_ptr<Bound> made(new Bound{std::move(launches), Kept(answer[1])});
        Under<std::shared_ptr<Bound>> old;  // destroyed after the lock is released
        std::lock_guard<std::mutex> lock(mutex);
        if (bound.size() >= most_entries) old.swap(bound);
        bound.emplace(std::move(key), made);
        return made;
    });
}

int64_t stream_of(c10::Device device) {
    if (!device.is_cuda()) return 0;
    return reinterpret_cast<int64_t>(c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle());
}

void Program::run(const std::vector<Tensor>& tensors) const {
    if (native) {
        std::vector<uint64_t> own(words);
        for (size_t i = 0; i < places.size(); i++) own[places[i]] = reinterpret_cast<uint64_t>(tensors[i].data_ptr());
        uint64_t at = reinterpret_cast<uint64_t>(tensors.back().data_ptr()), start = -at % LINE_BYTES;
        own[scratch_at] = at + start;
        own[scratch_at + 1] = work_bytes - start;
        native(own.data(), direction);
        return;
    }
    thread_local Words key;
    key = {number, stream_of(device)};
    for (const Tensor& x : tensors) key.push_back(reinterpret_cast<int64_t>(x.data_ptr()));
    std::shared_ptr<Bound> at;
    {
        std::lock_guard<std::mutex> lock(mutex);
        auto found = bound.find(key);
        if (found != bound.end()) at = found->second;
    }
    if (!at) at = bind(key);
    for (const Launch& each : at->launches) {
        const uint64_t* a = each.arguments;
        int code = each.function(a[0], a[1], a[2], a[3]);
        if (!code) continue;
        with_python([&] { plan->get().attr("answered")(code); });  // raises, or creates a context
        code = each.function(a[0], a[1], a[2], a[3]);
        // One string, because TORCH_CHECK joins several strings with a C++ stream, which crashes if the compiler links
        // libstdc++ statically: the process then has two copies of libstdc++, which share the identifiers of locales.
        TORCH_CHECK(!code, "CUDA: a launch returned " + std::to_string(code) + " again");
    }
}

const c10::DispatchKeySet PLAIN({c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCPU,
                                 c10::DispatchKey::AutogradCUDA, c10::DispatchKey::ADInplaceOrView,
                                 c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA,
                                 c10::DispatchKey::BackendSelect});

bool within(c10::DispatchKeySet keys) { return !(keys.raw_repr() & ~PLAIN.raw_repr()); }

bool is_plain_tensor(const Tensor& x) { return within(x.key_set()); }

bool is_traced_or_transformed() {
    const auto local = c10::impl::tls_local_dispatch_key_set();
    return !within(local.included_) || c10::impl::TorchDispatchModeTLS::any_modes_set() ||
           at::impl::torch_function_mode_enabled() || torch::jit::tracer::isTracing() ||
           torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

void add(Words& key, const Tensor& x) {
    if (!x.defined()) {
        key.push_back(-1);
        return;
    }
    const int64_t align = reinterpret_cast<int64_t>(x.data_ptr()) % ALIGNED_BYTES;
    key.push_back(x.dim() | int64_t(x.scalar_type()) << 8 | int64_t(x.device().type()) << 16 |
                  int64_t(uint8_t(x.device().index())) << 24 | align << 32);
    for (int64_t n : x.sizes()) key.push_back(n);
    for (int64_t n : x.strides()) key.push_back(n);
}

std::shared_ptr<Program> find(const Words& key) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = programs.find(key);
    return found == programs.end() ? nullptr : found->second;
}

void forward_key(Words& key, const Call& call, const Tensor& q, const Tensor& k, const Tensor& v) {
    key = call.key;
    key.push_back(0);
    key.push_back(at::get_num_threads());
    add(key, q), add(key, k), add(key, v);
}

void backward_key(Words& key, const Call& call, const variable_list& reads, int64_t wanted) {
    key = call.key;
    key.push_back(1 | wanted << 1 | int64_t(call.deterministic) << 8);
    key.push_back(at::get_num_threads());
    for (const Tensor& x : reads) add(key, x);
}

c10::OptionalDeviceGuard on_device_of(const Program& program) {
    return program.device.is_cuda() ? c10::OptionalDeviceGuard(program.device) : c10::OptionalDeviceGuard();
}

variable_list run_forward(Program& program, const Tensor& q, const Tensor& k, const Tensor& v) {
    at::AutoDispatchBelowADInplaceOrView below;
    const auto on = on_device_of(program);
    Tensor o = program.outputs[0].make(), lse = program.outputs[1].make();
    program.run({q, k, v, o, lse, at::empty({program.work_bytes}, program.work_options)});
    return {o, lse};
}

bool rows_aligned(const Tensor& x) {
    if (x.stride(-1) != 1 || reinterpret_cast<int64_t>(x.data_ptr()) % ALIGNED_BYTES) return false;
    for (int64_t i = 0; i + 1 < x.dim(); i++)
        if (x.size(i) > 1 && (x.stride(i) == 0 || x.stride(i) * x.element_size() % ALIGNED_BYTES)) return false;
    return true;
}

struct EagerAttention : torch::autograd::Function<EagerAttention> {
    static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                                 const CallPtr& call, Program& program, bool return_lse) {
        variable_list out;
        {
            py::gil_scoped_release free;
            out = run_forward(program, q, k, v);
        }
        ctx->set_materialize_grads(false);
        ctx->save_for_backward({q, k, v, out[0], out[1]});
        ctx->saved_data["call"] = reinterpret_cast<int64_t>(call.get());  // a number: compiled autograd hashes saved data
        if (program.native) ctx->saved_data["isa"] = program.isa;  // the environment is read only under the GIL
        if (!return_lse) out.pop_back();
        return out;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        variable_list out(6);
        Tensor dlse = grads.size() > 1 ? grads[1] : Tensor(), dout = grads[0];
        if (!dout.defined() && !dlse.defined()) return out;
        variable_list reads = ctx->get_saved_variables();
        if (!dout.defined()) dout = at::zeros_like(reads[3]);
        reads.push_back(dout);
        reads.push_back(dlse);
        const Call& call = *reinterpret_cast<const Call*>(ctx->saved_data["call"].toInt());
        int64_t wanted = 0;
        for (int i = 0; i < 3; i++) wanted |= int64_t(ctx->needs_input_grad(i)) << i;
        bool fast = !c10::GradMode::is_enabled() && !is_traced_or_transformed();
        for (const Tensor& x : reads) fast = fast && (!x.defined() || is_plain_tensor(x));
        if (fast) {
            thread_local Words key;
            backward_key(key, call, reads, wanted);
            auto program = find(key);
            if (!program && !rows_aligned(dout)) {
                at::AutoDispatchBelowADInplaceOrView below;
                reads[5] = dout.clone(at::MemoryFormat::Contiguous);
                backward_key(key, call, reads, wanted);
                program = find(key);
            }
            if (program && (!program->native || program->isa == ctx->saved_data["isa"].toStringRef())) {
                at::AutoDispatchBelowADInplaceOrView below;
                const auto on = on_device_of(*program);
                std::vector<Tensor> tensors(reads.begin(), reads.end() - !dlse.defined());
                for (int i = 0, n = 0; i < 3; i++)
                    if (wanted >> i & 1) tensors.push_back(out[i] = program->outputs[n++].make());
                tensors.push_back(at::empty({program->work_bytes}, program->work_options));
                program->run(tensors);
                return out;
            }
        }
        with_python([&] {
            py::list given;
            for (const Tensor& x : reads) given.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(x)));
            py::tuple wants(5);  // dq, dk, dv, dbias, dsinks
            for (int i = 0; i < 5; i++) wants[i] = py::bool_(wanted >> i & 1);
            py::tuple made = py::reinterpret_borrow<py::object>(slow_backward)(given, call.mask.get(), wants, call.kernel.get(),
                                                                              py::bool_(call.deterministic));
            for (int i = 0; i < 3; i++)
                if (!made[i].is_none()) out[i] = THPVariable_Unpack(py::object(made[i]).ptr());
        });
        return out;
    }
};

bool is_tensor_or_parameter(PyObject* x) {
    return Py_TYPE(x) == (PyTypeObject*)THPVariableClass || Py_TYPE(x) == (PyTypeObject*)parameter_class;
}

// The call, or null if no program was added for it.
CallPtr call_of(PyObject* mask, PyObject* kernel, PyObject* table, bool deterministic) {
    thread_local Words key;
    if (kernel != Py_None && !PyUnicode_CheckExact(kernel)) return {};
    const int64_t name = PyObject_Hash(kernel);
    if (name == -1) {
        PyErr_Clear();
        return {};
    }
    key = {reinterpret_cast<int64_t>(mask), name, reinterpret_cast<int64_t>(table), deterministic};
    auto found = calls.find(key);
    return found == calls.end() ? CallPtr() : found->second;
}

CallPtr new_call(py::object mask, py::object kernel, py::object table, bool deterministic) {
    Words key = {reinterpret_cast<int64_t>(mask.ptr()), int64_t(py::hash(kernel)), reinterpret_cast<int64_t>(table.ptr())};
    for (bool mode : {false, true}) {  // a backward may run in either mode
        Words whole = key;
        whole.push_back(mode);
        calls[whole] = c10::make_intrusive<Call>(mask, kernel, table, mode, key);
    }
    key.push_back(deterministic);
    return calls[key];
}

PyObject* wrapped(const variable_list& out, bool return_lse) {
    if (!return_lse) return THPVariable_Wrap(out[0]);
    py::tuple pair(2);
    for (int i = 0; i < 2; i++) pair[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(out[i]));
    return pair.release().ptr();
}

// (q, k, v, mask, kernel, table, deterministic, return_lse) → o, (o, lse), or None
PyObject* attend(PyObject*, PyObject* const* args, Py_ssize_t n) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(n == 8);
    if (!is_tensor_or_parameter(args[0]) || !is_tensor_or_parameter(args[1]) || !is_tensor_or_parameter(args[2])) Py_RETURN_NONE;
    const Tensor &q = THPVariable_Unpack(args[0]), &k = THPVariable_Unpack(args[1]), &v = THPVariable_Unpack(args[2]);
    if (!is_plain_tensor(q) || !is_plain_tensor(k) || !is_plain_tensor(v) || is_traced_or_transformed()) Py_RETURN_NONE;
    if (at::autocast::is_autocast_enabled(at::kCPU) || at::autocast::is_autocast_enabled(at::kCUDA)) Py_RETURN_NONE;
    const int deterministic = args[6] == Py_None ? at::globalContext().deterministicAlgorithms() : PyObject_IsTrue(args[6]);
    const int return_lse = PyObject_IsTrue(args[7]);
    if (deterministic < 0 || return_lse < 0) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    const CallPtr call = call_of(args[3], args[4], args[5], deterministic);
    if (!call) Py_RETURN_NONE;
    thread_local Words key;
    forward_key(key, *call, q, k, v);
    auto program = find(key);
    if (!program || (program->native && program->isa != requested_isa())) Py_RETURN_NONE;
    if (c10::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad()))
        return wrapped(EagerAttention::apply(q, k, v, call, *program, return_lse), return_lse);
    variable_list out;
    {
        py::gil_scoped_release free;
        out = run_forward(*program, q, k, v);
    }
    return wrapped(out, return_lse);
    END_HANDLE_TH_ERRORS
}

void drop(Under<std::shared_ptr<Program>>& old_programs, Under<std::shared_ptr<Bound>>& old_bound) {
    old_programs.swap(programs);
    old_bound.swap(bound);
}

// Adds the program of calls that read (q, k, v) or (q, k, v, o, lse, do, dlse), allocate (o, lse) or (dq, dk, dv), both passed
// as examples, and use work_bytes of scratch. Returns true if all other programs were dropped to make room.
bool add_program(py::object mask, py::object kernel, py::object table, bool deterministic, int64_t wanted,
                 py::tuple reads, py::tuple outputs, int64_t work_bytes, py::object native, py::object plan) {
    static int64_t numbered = 0;
    variable_list given;
    for (auto x : reads) given.push_back(x.is_none() ? Tensor() : THPVariable_Unpack(x.ptr()));
    auto program = std::make_shared<Program>();
    for (auto x : outputs)
        if (!x.is_none()) program->outputs.emplace_back(THPVariable_Unpack(x.ptr()));
    program->work_bytes = work_bytes;
    program->work_options = given[0].options().dtype(at::kByte).requires_grad(false);
    program->device = given[0].device();
    program->number = numbered++;
    if (!native.is_none()) {
        py::tuple of = native;
        program->native = reinterpret_cast<void (*)(const void*, int64_t)>(of[0].cast<uint64_t>());
        program->direction = of[1].cast<int64_t>();
        program->words = of[2].cast<std::vector<uint64_t>>();
        program->places = of[3].cast<std::vector<int64_t>>();
        program->scratch_at = of[4].cast<int64_t>();
        program->isa = requested_isa();
    } else {
        program->plan = std::make_unique<const Kept>(plan);
    }
    CallPtr call = call_of(mask.ptr(), kernel.ptr(), table.ptr(), deterministic);
    if (!call && calls.size() >= MOST_CALLS * most_entries) return false;
    if (!call) call = new_call(mask, kernel, table, deterministic);
    Words key;
    if (given.size() == 3) forward_key(key, *call, given[0], given[1], given[2]);
    else backward_key(key, *call, given, wanted);
    Under<std::shared_ptr<Program>> old_programs;  // destroyed after the lock is released
    Under<std::shared_ptr<Bound>> old_bound;
    std::lock_guard<std::mutex> lock(mutex);
    const bool full = programs.size() >= most_entries;
    if (full) drop(old_programs, old_bound);
    std::swap(programs[key], program);
    return full;
}

PyMethodDef attend_method{"attend", (PyCFunction)(void (*)())attend, METH_FASTCALL, nullptr};

}  // namespace

PYBIND11_MODULE(MODULE, m) {
    m.def("add_program", &add_program);
    m.def("drop_programs", [] {
        Under<std::shared_ptr<Program>> old_programs;
        Under<std::shared_ptr<Bound>> old_bound;
        std::lock_guard<std::mutex> lock(mutex);
        drop(old_programs, old_bound);
    });
    m.def("use", [](py::object parameter, py::object backward, size_t most) {
        parameter_class = parameter.release().ptr();
        slow_backward = backward.release().ptr();
        most_entries = most;
    });
    m.add_object("attend", py::reinterpret_steal<py::object>(PyCFunction_New(&attend_method, nullptr)));
    m.attr("digest") = DIGEST;
    pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
}
