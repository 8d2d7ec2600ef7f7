// Eager calls of attention whose signature is known: from Python's arguments to the kernel, and back through autograd, without
// Python in between. ../autograd/run.py checks a call, selects and prepares its kernel, and adds that as a program here. A call
// that has no program, or that something wants to see, is answered with None, and ../autograd runs it.
//
//   Call      what a call has beside tensors: its mask without tensors, the kernel asked for, the table of kernels
//   Program   of a signature in one direction: what it allocates, and the structure on which its kernel starts, a function of
//             the CPU's library: addresses are written into it
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
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

constexpr size_t MOST_ENTRIES = 4096;  // as kernels/cache.py
constexpr int64_t ALIGNED_BYTES = 16, LINE_BYTES = 64;

struct Hash {
    size_t operator()(const Words& words) const {
        uint64_t hash = 1469598103934665603u;
        for (int64_t word : words) hash = (hash ^ uint64_t(word)) * 1099511628211u, hash ^= hash >> 29;
        return hash;
    }
};

struct Call {
    PyObject *mask, *kernel, *table;
    bool deterministic;
    Words key;
};

struct Form {
    Words sizes, strides;
    at::TensorOptions options;
    explicit Form(const Tensor& x) : sizes(x.sizes().vec()), strides(x.strides().vec()), options(x.options().requires_grad(false)) {}
    Tensor make() const { return at::empty_strided(sizes, strides, options); }
};

struct Program {
    std::vector<Form> outputs;
    int64_t work_bytes = 0;
    at::TensorOptions work_options;
    void (*native)(const void*, int64_t) = nullptr;
    int64_t direction = 0, scratch_at = 0;
    std::vector<uint64_t> words;
    std::vector<int64_t> places;
    std::string isa;

    void run(const std::vector<Tensor>& tensors) const;
};

using Programs = std::unordered_map<Words, std::shared_ptr<Program>, Hash>;
std::mutex programs_mutex;
Programs& programs = *new Programs;  // never destroyed: at exit there is no interpreter to give objects back to
auto& calls = *new std::unordered_map<Words, Call*, Hash>;  // under the GIL; they stay, for nodes and keys have their addresses
PyObject *parameter_class = nullptr, *slow_backward = nullptr;

const char* asked_isa() {
    const char* isa = std::getenv("TILEGRAD_ISA");
    return isa ? isa : "";
}

// As Python acquires and raises: an error of Python's crosses autograd's threads.
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

void Program::run(const std::vector<Tensor>& tensors) const {
    std::vector<uint64_t> own(words);
    for (size_t i = 0; i < places.size(); i++) own[places[i]] = reinterpret_cast<uint64_t>(tensors[i].data_ptr());
    uint64_t at = reinterpret_cast<uint64_t>(tensors.back().data_ptr()), start = -at % LINE_BYTES;
    own[scratch_at] = at + start;
    own[scratch_at + 1] = work_bytes - start;
    native(own.data(), direction);
}

const c10::DispatchKeySet PLAIN({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU, c10::DispatchKey::ADInplaceOrView,
                                 c10::DispatchKey::AutocastCPU, c10::DispatchKey::BackendSelect});

bool within(c10::DispatchKeySet keys) { return !(keys.raw_repr() & ~PLAIN.raw_repr()); }

bool plain(const Tensor& x) { return within(x.key_set()); }

bool observed() {
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
    std::lock_guard<std::mutex> lock(programs_mutex);
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

variable_list run_forward(Program& program, const Tensor& q, const Tensor& k, const Tensor& v) {
    at::AutoDispatchBelowADInplaceOrView below;
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
                                 const Call* call, Program& program, bool return_lse) {
        variable_list out;
        {
            py::gil_scoped_release free;
            out = run_forward(program, q, k, v);
        }
        ctx->set_materialize_grads(false);
        ctx->save_for_backward({q, k, v, out[0], out[1]});
        ctx->saved_data["call"] = reinterpret_cast<int64_t>(call);
        ctx->saved_data["isa"] = program.isa;  // the environment is read under the GIL alone
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
        bool fast = !c10::GradMode::is_enabled() && !observed();
        for (const Tensor& x : reads) fast = fast && (!x.defined() || plain(x));
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
            if (program && program->isa == ctx->saved_data["isa"].toStringRef()) {
                at::AutoDispatchBelowADInplaceOrView below;
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
            py::tuple wants(3);
            for (int i = 0; i < 3; i++) wants[i] = py::bool_(wanted >> i & 1);
            py::tuple made = py::reinterpret_borrow<py::object>(slow_backward)(
                given, py::reinterpret_borrow<py::object>(call.mask), wants, py::reinterpret_borrow<py::object>(call.kernel),
                py::bool_(call.deterministic));
            for (int i = 0; i < 3; i++)
                if (!made[i].is_none()) out[i] = THPVariable_Unpack(py::object(made[i]).ptr());
        });
        return out;
    }
};

bool exact(PyObject* x) { return Py_TYPE(x) == (PyTypeObject*)THPVariableClass || Py_TYPE(x) == (PyTypeObject*)parameter_class; }

// The call, or none: where no program was added for it.
const Call* call_of(PyObject* numbers, PyObject* kernel, PyObject* table, bool deterministic) {
    thread_local Words key;
    if (kernel != Py_None && !PyUnicode_CheckExact(kernel)) return nullptr;
    const int64_t name = PyObject_Hash(kernel);
    if (name == -1) {
        PyErr_Clear();
        return nullptr;
    }
    key = {reinterpret_cast<int64_t>(numbers), name, reinterpret_cast<int64_t>(table), deterministic};
    auto found = calls.find(key);
    return found == calls.end() ? nullptr : found->second;
}

// The same, made for both modes; none where there are too many.
const Call* new_call(py::object mask, py::object numbers, py::object kernel, py::object table, bool deterministic) {
    const Call* known = call_of(numbers.ptr(), kernel.ptr(), table.ptr(), deterministic);
    if (known || calls.size() >= MOST_ENTRIES) return known;
    const Words own = {reinterpret_cast<int64_t>(numbers.ptr()), int64_t(py::hash(kernel)), reinterpret_cast<int64_t>(table.ptr())};
    for (bool mode : {false, true}) {
        for (auto x : {mask, kernel, table}) x.inc_ref();  // the mask has its numbers
        Words key = own;
        key.push_back(mode);
        calls[key] = new Call{mask.ptr(), kernel.ptr(), table.ptr(), mode, own};
    }
    return call_of(numbers.ptr(), kernel.ptr(), table.ptr(), deterministic);
}

PyObject* wrapped(const variable_list& out, bool return_lse) {
    if (!return_lse) return THPVariable_Wrap(out[0]);
    py::tuple pair(2);
    for (int i = 0; i < 2; i++) pair[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(out[i]));
    return pair.release().ptr();
}

// (q, k, v, numbers, kernel, table, deterministic, return_lse) → o, (o, lse), or None; numbers: of the mask
PyObject* attend(PyObject*, PyObject* const* args, Py_ssize_t n) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(n == 8);
    if (!exact(args[0]) || !exact(args[1]) || !exact(args[2])) Py_RETURN_NONE;
    const Tensor &q = THPVariable_Unpack(args[0]), &k = THPVariable_Unpack(args[1]), &v = THPVariable_Unpack(args[2]);
    if (!plain(q) || !plain(k) || !plain(v) || observed()) Py_RETURN_NONE;
    if (at::autocast::is_autocast_enabled(at::kCPU) || at::autocast::is_autocast_enabled(at::kCUDA)) Py_RETURN_NONE;
    const int deterministic = args[6] == Py_None ? at::globalContext().deterministicAlgorithms() : PyObject_IsTrue(args[6]);
    const int return_lse = PyObject_IsTrue(args[7]);
    if (deterministic < 0 || return_lse < 0) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    const Call* call = call_of(args[3], args[4], args[5], deterministic);
    if (!call) Py_RETURN_NONE;
    thread_local Words key;
    forward_key(key, *call, q, k, v);
    auto program = find(key);
    if (!program || program->isa != asked_isa()) Py_RETURN_NONE;
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

// Of reads (q, k, v) or (q, k, v, o, lse, do, dlse), with what such a call allocates: exemplars of (o, lse) or (dq, dk, dv), and
// the bytes of scratch. True where all others were dropped for it.
bool add_program(py::object mask, py::object numbers, py::object kernel, py::object table, bool deterministic, int64_t wanted,
                 py::tuple reads, py::tuple outputs, int64_t work_bytes, py::tuple native) {
    variable_list given;
    for (auto x : reads) given.push_back(x.is_none() ? Tensor() : THPVariable_Unpack(x.ptr()));
    const Call* call = new_call(mask, numbers, kernel, table, deterministic);
    if (!call) return false;
    auto program = std::make_shared<Program>();
    for (auto x : outputs)
        if (!x.is_none()) program->outputs.emplace_back(THPVariable_Unpack(x.ptr()));
    program->work_bytes = work_bytes;
    program->work_options = given[0].options().dtype(at::kByte).requires_grad(false);
    program->native = reinterpret_cast<void (*)(const void*, int64_t)>(native[0].cast<uint64_t>());
    program->direction = native[1].cast<int64_t>();
    program->words = native[2].cast<std::vector<uint64_t>>();
    program->places = native[3].cast<std::vector<int64_t>>();
    program->scratch_at = native[4].cast<int64_t>();
    program->isa = asked_isa();
    Words key;
    if (given.size() == 3) forward_key(key, *call, given[0], given[1], given[2]);
    else backward_key(key, *call, given, wanted);
    Programs old;  // destroyed after the lock is given back
    std::lock_guard<std::mutex> lock(programs_mutex);
    if (programs.size() >= MOST_ENTRIES) old.swap(programs);
    std::swap(programs[key], program);
    return !old.empty();
}

PyMethodDef attend_method{"attend", (PyCFunction)(void (*)())attend, METH_FASTCALL, nullptr};

}  // namespace

PYBIND11_MODULE(MODULE, m) {
    m.def("add_program", &add_program);
    m.def("drop_programs", [] {
        Programs old;
        std::lock_guard<std::mutex> lock(programs_mutex);
        old.swap(programs);
    });
    m.def("use", [](py::object parameter, py::object backward) {
        parameter_class = parameter.release().ptr();
        slow_backward = backward.release().ptr();
    });
    m.add_object("attend", py::reinterpret_steal<py::object>(PyCFunction_New(&attend_method, nullptr)));
    m.attr("digest") = DIGEST;
    pthread_atfork([] { programs_mutex.lock(); }, [] { programs_mutex.unlock(); }, [] { programs_mutex.unlock(); });
}
