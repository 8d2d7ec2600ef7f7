// Cache hits of the buffer manager in C++: an `allocate` that finds a cached buffer of its key or of a fitting size,
// and a `deallocate` of a buffer that only the caller references. manager.py is the reference, and its lists, dicts and
// counters are the only state: this file reads and writes the fields of those objects. No Python code runs between the
// first change and the last, so neither an interrupt nor another thread can see a partial change. Every other call is
// forwarded unchanged to the Python function: a miss, another reference, another dtype, a full cache, zeroing, a scope,
// a profile, debug, freed CUDA buffers, misuse.
#include <Python.h>
#ifdef Py_GIL_DISABLED
#error "hit.cpp reads fields of Python objects under the GIL; this Python is built without it"
#endif
#include <structmember.h>
#include <c10/core/TensorImpl.h>

#include <exception>
#include <utility>
#include <vector>

namespace {

// A Python class with __slots__: each attribute is a pointer at one offset in every instance, null if it was never set.
struct Field;
struct Class {
    PyTypeObject* type = nullptr;
    std::vector<Field*> fields;
};
struct Field {
    const char* name;
    Py_ssize_t offset = 0;
    Field(Class& owner, const char* name) : name(name) { owner.fields.push_back(this); }
    PyObject*& operator()(PyObject* object) const {
        return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
    }
};

namespace manager {
Class self;
Field cache{self, "_cache"}, debug{self, "_debug"}, device{self, "_device"}, events{self, "_events"},
    profile{self, "_profile"}, scope{self, "_scope"}, tracked{self, "_tracked"};
}
namespace cache {
Class self;
Field bounded{self, "bounded"}, clock{self, "clock"}, dropped{self, "dropped"}, free_lists{self, "free_lists"},
    high_water{self, "_high_water"}, limits{self, "limits"}, max_bytes{self, "max_bytes"}, most_held{self, "most_held"},
    pools{self, "pools"}, slots{self, "slots"};
}
namespace free_list {
Class self;
Field dtype{self, "dtype"}, gave{self, "gave"}, most{self, "most"}, nbytes{self, "nbytes"}, pool{self, "pool"},
    shape{self, "shape"}, slots{self, "slots"}, took{self, "took"};
}
namespace pool {
Class self;
Field free{self, "free"}, hits{self, "hits"}, limit{self, "limit"}, on_cuda{self, "on_cuda"}, type{self, "type"};
}
namespace slot {
Class self;
Field alone{self, "alone"}, cdata{self, "cdata"}, free_list{self, "free_list"}, freed{self, "freed"},
    handle{self, "handle"}, ident{self, "ident"}, nbytes{self, "nbytes"}, pool{self, "pool"}, ptr{self, "ptr"},
    scope{self, "scope"}, slack{self, "slack"}, stamp{self, "stamp"}, storage_bytes{self, "storage_bytes"},
    storage_object{self, "storage_object"}, storage_refs{self, "storage_refs"}, zero{self, "zero"};
}

PyObject *cpu, *mode_stack_depth, *default_dtype;
PyObject *append, *no_scope;  // interned, like the argument names
PyObject *allocate_names[5], *deallocate_names[2];

bool is(PyObject* object, PyTypeObject* type) { return object && Py_TYPE(object) == type; }

bool read(PyObject* number, int64_t& to) {
    if (!is(number, &PyLong_Type)) return false;
    int overflow = 0;
    to = PyLong_AsLongLongAndOverflow(number, &overflow);
    return !overflow;
}

struct Owned {
    PyObject* object;
    explicit Owned(PyObject* given) : object(given) {}
    Owned(const Owned&) = delete;
    ~Owned() { Py_XDECREF(object); }
    explicit operator bool() const { return object; }
    PyObject* give() { return std::exchange(object, nullptr); }
};

void put(PyObject*& field, PyObject* owned) { Py_XDECREF(std::exchange(field, owned)); }

bool note(PyObject* events, PyObject* event) {
    PyObject* arguments[] = {events, event};
    return bool(Owned(PyObject_VectorcallMethod(append, arguments, 2, nullptr)));
}

// A tensor's Python object begins with a pointer to its TensorImpl; hit.py verifies this with `fits`.
c10::TensorImpl* unpack(PyObject* tensor) { return *reinterpret_cast<c10::TensorImpl**>(tensor + 1); }

// A new reference to the object of a weak reference, or null.
PyObject* target(PyObject* weak) {
    if (!weak || !PyWeakref_CheckRef(weak)) return nullptr;
#if PY_VERSION_HEX >= 0x030D0000
    PyObject* object = nullptr;
    return PyWeakref_GetRef(weak, &object) < 0 ? (PyErr_Clear(), nullptr) : object;
#else
    PyObject* object = PyWeakref_GET_OBJECT(weak);
    return object == Py_None ? nullptr : Py_NewRef(object);
#endif
}

// The three counts of slot.py: only the tensor's own object references the tensor, its storage and the storage's object.
bool held_alone(PyObject* here, PyObject* tensor) {
    int64_t cdata, alone, storage_refs;
    if (!read(slot::cdata(here), cdata) || !read(slot::alone(here), alone)) return false;
    if (!read(slot::storage_refs(here), storage_refs)) return false;
    const Owned object(target(slot::storage_object(here)));  // keeps the StorageImpl at cdata alive
    if (!object || Py_REFCNT(object.object) + 1 != storage_refs) return false;  // sys.getrefcount counts its argument too
    if (c10::raw::intrusive_ptr::use_count(unpack(tensor)) != 1) return false;
    return c10::raw::intrusive_ptr::use_count(reinterpret_cast<c10::StorageImpl*>(cdata)) == size_t(alone);
}

using Sizes = c10::SmallVector<int64_t, 8>;

bool read(PyObject* shape, Sizes& to) {
    if (!is(shape, &PyTuple_Type)) return false;
    to.resize(PyTuple_GET_SIZE(shape));
    for (size_t i = 0; i < to.size(); ++i)
        if (!read(PyTuple_GET_ITEM(shape, i), to[i])) return false;
    return true;
}

// The same as `in_use` of cache.py.
bool sum_in_use(PyObject* here, int64_t& bytes) {
    PyObject *ident, *each;
    bytes = 0;
    for (Py_ssize_t at = 0; PyDict_Next(cache::slots(here), &at, &ident, &each);) {
        int64_t nbytes;
        if (!is(each, slot::self.type) || !read(slot::nbytes(each), nbytes)) return false;
        bytes += nbytes;
    }
    return true;
}

// The same as `_best_fit` of cache.py, but without its tolerance of 5 %: the smallest cached buffer of nbytes to 1.25
// nbytes, if the bytes in use stay below the high-water mark.
PyObject* best_fit(PyObject* here, PyObject* list, PyObject* free) {
    PyObject *best = nullptr, *each, *tensor;
    int64_t nbytes, least, size, most_held, high_water, in_use;
    if (!read(free_list::nbytes(list), nbytes) || !read(free_list::most(list), least)) return nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(free, &at, &each, &tensor);) {
        if (!is(each, slot::self.type) || !read(slot::storage_bytes(each), size)) return nullptr;
        if (nbytes <= size && size <= least) best = each, least = size;
    }
    if (!best || !read(cache::most_held(here), most_held) || !read(cache::high_water(here), high_water)) return nullptr;
    if (most_held <= high_water) return best;
    if (!read(slot::nbytes(best), size) || !sum_in_use(here, in_use)) return nullptr;
    return in_use + size <= high_water ? best : nullptr;
}

// Whether set_sizes is enough to give the tensor this shape: same dtype, not in an autograd graph, still its own bytes.
bool can_reshape(PyObject* here, PyObject* list, c10::TensorImpl* impl) {
    int64_t cdata, storage_bytes;
    PyObject* old = slot::free_list(here);
    if (!is(old, free_list::self.type) || free_list::dtype(old) != free_list::dtype(list)) return false;
    if (impl->requires_grad() || !read(slot::cdata(here), cdata)) return false;
    if (!read(slot::storage_bytes(here), storage_bytes)) return false;
    const c10::StorageImpl* storage = impl->storage().unsafeGetStorageImpl();
    return reinterpret_cast<int64_t>(storage) == cdata && int64_t(storage->nbytes()) >= storage_bytes;
}

bool remove(PyObject* list, PyObject* item) {
    Py_ssize_t i = PyList_GET_SIZE(list) - 1;
    while (i >= 0 && PyList_GET_ITEM(list, i) != item) --i;
    return i < 0 || PyList_SetSlice(list, i, i + 1, nullptr) == 0;
}

// Maps the arguments after self, positional or by name, to `given` in the order of `names`. False if they do not match.
template <size_t N>
bool spread(PyObject* const (&names)[N], PyObject* const* args, size_t n, PyObject* keywords, PyObject* (&given)[N]) {
    if (n > N) return false;
    for (size_t i = 0; i < n; ++i) given[i] = args[i];
    for (Py_ssize_t k = 0; keywords && k < PyTuple_GET_SIZE(keywords); ++k) {
        size_t i = n;
        while (i < N && PyTuple_GET_ITEM(keywords, k) != names[i]) ++i;
        if (i == N) return false;
        given[i] = args[n + k];
    }
    return true;
}

PyObject* plain_cache(PyObject* self) {
    PyObject* here = manager::cache(self);
    return is(here, cache::self.type) && manager::profile(self) == Py_None && manager::debug(self) == Py_False ? here : nullptr;
}

// The cached tensor. Null if this is not a hit, or if a Python error is set.
PyObject* take(PyObject* self, PyObject* (&given)[5]) {
    auto [type, shape, dtype, device, zero_init] = given;
    PyObject* here = plain_cache(self);
    if (!here || !type || !shape || (zero_init && zero_init != Py_None && zero_init != Py_False)) return nullptr;
    if (!device || device == Py_None) device = manager::device(self);
    if (device == Py_None) {
        const Owned depth(PyObject_CallNoArgs(mode_stack_depth));
        int64_t modes;
        if (!depth || !read(depth.object, modes) || modes) return nullptr;
        device = cpu;
    }
    if (!device) return nullptr;
    const Owned key(PyTuple_Pack(4, type, shape, dtype ? dtype : default_dtype, device));
    if (!key) return nullptr;
    const Owned lists(Py_XNewRef(cache::free_lists(here)));  // hashing may run Python, which may replace the dict
    if (!lists) return nullptr;
    const Owned kept(Py_XNewRef(PyDict_GetItemWithError(lists.object, key.object)));
    PyObject* list = kept.object;
    if (!list && PyErr_ExceptionMatches(PyExc_TypeError)) PyErr_Clear();  // the Python function will raise the proper error
    if (!list && PyErr_Occurred()) return nullptr;
    if (!is(list, free_list::self.type)) return nullptr;
    PyObject *slots = free_list::slots(list), *pools = free_list::pool(list);
    if (!is(pools, pool::self.type)) return nullptr;
    PyObject* free = pool::free(pools);
    if (!PyDict_GET_SIZE(free)) return nullptr;

    if (PyObject_Size(cache::dropped(here))) return nullptr;
    const Py_ssize_t count = PyList_GET_SIZE(slots);
    PyObject* found = count ? PyList_GET_ITEM(slots, count - 1) : best_fit(here, list, free);
    if (!is(found, slot::self.type)) return nullptr;
    Owned tensor(Py_XNewRef(PyDict_GetItemWithError(free, found)));
    if (!tensor || slot::freed(found) != Py_None) return nullptr;
    if (zero_init != Py_False && slot::zero(found) != Py_False) return nullptr;
    c10::TensorImpl* impl = unpack(tensor.object);
    Sizes sizes;
    int64_t ptr, nbytes, wanted, hits;
    if (!read(slot::ptr(found), ptr) || impl->mutable_data() != reinterpret_cast<void*>(ptr)) return nullptr;
    if (!read(free_list::shape(list), sizes)) return nullptr;
    if (count ? !impl->sizes().equals(sizes) || !impl->is_contiguous() : !can_reshape(found, list, impl)) return nullptr;
    if (manager::tracked(self) == Py_True) {
        // two references: from the pool and from `tensor`
        if (Py_REFCNT(tensor.object) != 2 || !held_alone(found, tensor.object)) return nullptr;
        Owned scope(nullptr);
        if (PyContextVar_Get(manager::scope(self), nullptr, &scope.object) < 0 || scope.object != Py_None) return nullptr;
    }
    if (!read(slot::nbytes(found), nbytes) || !read(free_list::nbytes(list), wanted)) return nullptr;
    if (!read(pool::hits(pools), hits)) return nullptr;
    Owned more(PyLong_FromLongLong(hits + 1)), slack(PyLong_FromLongLong(nbytes - wanted));
    if (!more || !slack) return nullptr;

    const Owned taken(Py_NewRef(found));
    if (!remove(free_list::slots(slot::free_list(found)), found)) return nullptr;
    if (!count) {
        impl->set_sizes_contiguous(sizes);
        put(slot::free_list(found), Py_NewRef(list));
        put(slot::slack(found), slack.give());
    }
    if (PyDict_SetItem(cache::slots(here), slot::ident(found), found) < 0 || PyDict_DelItem(free, found) < 0) return nullptr;
    if (!note(manager::events(self), free_list::took(list))) return nullptr;
    put(pool::hits(pools), more.give());
    put(slot::scope(found), Py_NewRef(no_scope));
    return tensor.give();
}

// The same as `cached` of cache.py.
bool sum_cached(PyObject* here, int64_t& bytes) {
    PyObject *key, *pools, *each, *tensor;
    bytes = 0;
    for (Py_ssize_t at = 0; PyDict_Next(cache::pools(here), &at, &key, &pools);) {
        if (!is(pools, pool::self.type)) return false;
        for (Py_ssize_t in = 0; PyDict_Next(pool::free(pools), &in, &each, &tensor);) {
            int64_t nbytes;
            if (!is(each, slot::self.type) || !read(slot::nbytes(each), nbytes)) return false;
            bytes += nbytes;
        }
    }
    return true;
}

// Whether the buffer was cached. If false with a Python error set, the call raises that error.
bool give(PyObject* self, PyObject* (&given)[2]) {
    auto [tensor, type] = given;
    PyObject* here = plain_cache(self);
    if (!here || !tensor) return false;
    const Owned ident(PyLong_FromVoidPtr(tensor));
    const Owned kept(ident ? Py_XNewRef(PyDict_GetItemWithError(cache::slots(here), ident.object)) : nullptr);
    PyObject* found = kept.object;
    if (!is(found, slot::self.type) || Owned(target(slot::handle(found))).object != tensor) return false;
    PyObject *list = slot::free_list(found), *pools = slot::pool(found);
    if (!is(list, free_list::self.type) || !is(pools, pool::self.type)) return false;
    if (type && type != Py_None && type != pool::type(pools)) return false;
    if (unpack(tensor)->requires_grad() || !held_alone(found, tensor) || pool::on_cuda(pools) != Py_False) return false;

    int64_t limit, clock, nbytes, cached, max_bytes;
    PyObject* free = pool::free(pools);
    if (!read(pool::limit(pools), limit) || PyDict_GET_SIZE(free) >= limit) return false;
    if (cache::bounded(here) != Py_False) {
        if (PyDict_GET_SIZE(cache::limits(here)) || !read(cache::max_bytes(here), max_bytes)) return false;
        if (!sum_cached(here, cached) || !read(slot::nbytes(found), nbytes) || cached + nbytes > max_bytes) return false;
    }
    if (!read(cache::clock(here), clock) || !((clock + 1) & 255)) return false;
    Owned now(PyLong_FromLongLong(clock + 1));
    if (!now) return false;

    if (PyDict_SetItem(free, found, tensor) < 0 || PyDict_DelItem(cache::slots(here), ident.object) < 0) return false;
    if (PyList_Append(free_list::slots(list), found) < 0 || !note(manager::events(self), free_list::gave(list))) return false;
    put(slot::stamp(found), Py_NewRef(now.object));
    put(cache::clock(here), now.give());
    return true;
}

// The Python functions, called when the C++ ones cannot handle the call.
PyObject *python_allocate = nullptr, *python_deallocate = nullptr;

PyObject* in_python(PyObject* function, PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    if (PyErr_Occurred()) return nullptr;
    std::vector<PyObject*> all{self};
    all.insert(all.end(), args, args + n + (keywords ? PyTuple_GET_SIZE(keywords) : 0));
    return PyObject_Vectorcall(function, all.data(), n + 1, keywords);
}

PyObject* allocate(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    PyObject* given[5] = {};
    if (spread(allocate_names, args, n, keywords, given)) try {
            if (PyObject* tensor = take(self, given)) return tensor;
        } catch (const std::exception&) {  // torch rejects an unusual tensor; nothing was changed yet
        }
    return in_python(python_allocate, self, args, n, keywords);
}

PyObject* deallocate(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    PyObject* given[2] = {};
    if (spread(deallocate_names, args, n, keywords, given) && give(self, given)) Py_RETURN_NONE;
    return in_python(python_deallocate, self, args, n, keywords);
}

bool find(Class& known, PyObject* type) {
    for (Field* field : known.fields) {
        const Owned member(PyObject_GetAttrString(type, field->name));
        if (!member) return false;
        if (!is(member.object, &PyMemberDescr_Type)) {
            PyErr_Format(PyExc_TypeError, "%s is not in the __slots__ of %R", field->name, type);
            return false;
        }
        field->offset = reinterpret_cast<PyMemberDescrObject*>(member.object)->d_member->offset;
    }
    known.type = reinterpret_cast<PyTypeObject*>(Py_NewRef(type));
    return true;
}

// (tensor, its `_cdata`) → whether `unpack` reads the pointer correctly
PyObject* fits(PyObject*, PyObject* args) {
    PyObject* tensor;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "OK", &tensor, &address)) return nullptr;
    return PyBool_FromLong(reinterpret_cast<unsigned long long>(unpack(tensor)) == address);
}

// Arguments: the classes of the manager, cache, free list, pool and slot; torch.device("cpu"); the default dtype; the
// function that returns the depth of the torch function mode stack.
PyObject* use(PyObject*, PyObject* args) {
    Class* known[] = {&manager::self, &cache::self, &free_list::self, &pool::self, &slot::self};
    PyObject *classes[5], *device, *dtype, *depth;
    if (!PyArg_UnpackTuple(args, "use", 8, 8, classes, classes + 1, classes + 2, classes + 3, classes + 4, &device, &dtype,
                           &depth))
        return nullptr;
    for (int i = 0; i < 5; ++i)
        if (!find(*known[i], classes[i])) return nullptr;
    cpu = Py_NewRef(device), default_dtype = Py_NewRef(dtype), mode_stack_depth = Py_NewRef(depth);
    Py_RETURN_NONE;
}

// Sets the Python functions to fall back to: allocate and deallocate.
PyObject* fall_back(PyObject*, PyObject* args) {
    PyObject *takes, *gives;
    if (!PyArg_UnpackTuple(args, "fall_back", 2, 2, &takes, &gives)) return nullptr;
    put(python_allocate, Py_NewRef(takes));
    put(python_deallocate, Py_NewRef(gives));
    Py_RETURN_NONE;
}

// allocate and deallocate as method descriptors of the manager's class, as C types have them: Dynamo can call these.
PyObject* methods(PyObject*, PyObject*) {
    static PyMethodDef both[] = {
        {"allocate", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(allocate)), METH_FASTCALL | METH_KEYWORDS,
         "allocate($self, type, shape, dtype=..., device=None, zero_init=None)\n--\n\n"
         "A contiguous buffer, uninitialised unless `zero_init`. zero_init=None uses the type's config."},
        {"deallocate", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(deallocate)), METH_FASTCALL | METH_KEYWORDS,
         "deallocate($self, tensor, type=None)\n--\n\n"
         "Returns the buffer to the cache. Do not use the tensor afterwards, even if a variable still refers to it."},
    };
    const Owned first(PyDescr_NewMethod(manager::self.type, both)), second(PyDescr_NewMethod(manager::self.type, both + 1));
    return first && second ? PyTuple_Pack(2, first.object, second.object) : nullptr;
}

PyMethodDef functions[] = {
    {"fits", fits, METH_VARARGS, nullptr},
    {"use", use, METH_VARARGS, nullptr},
    {"fall_back", fall_back, METH_VARARGS, nullptr},
    {"methods", methods, METH_NOARGS, nullptr},
    {},
};
PyModuleDef definition{PyModuleDef_HEAD_INIT, "tilegrad_hit", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_tilegrad_hit() {
    append = PyUnicode_InternFromString("append"), no_scope = PyUnicode_InternFromString("");
    const char* names[] = {"type", "shape", "dtype", "device", "zero_init", "tensor", "type"};
    for (int i = 0; i < 7; ++i) (i < 5 ? allocate_names[i] : deallocate_names[i - 5]) = PyUnicode_InternFromString(names[i]);
    PyObject* module = PyModule_Create(&definition);
    if (module && PyModule_AddStringConstant(module, "digest", DIGEST) < 0) return nullptr;
    return module;
}
