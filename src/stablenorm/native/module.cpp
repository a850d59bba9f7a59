// What Python calls. Everything about the arguments is checked above, but for what memory safety needs: that
// arrays are arrays, and how they lie.
#define PY_SSIZE_T_CLEAN
#if !defined(Py_GIL_DISABLED) && !defined(Py_LIMITED_API)
#define Py_LIMITED_API 0x030b0000
#endif
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>

#include <cstring>
#include <initializer_list>

#include "jobs.h"
#include "memory.h"

namespace {

// Elements of a call that others may run beside: to release the GIL for less is a waste.
constexpr Index WORTH_RELEASING = 1 << 14;

int bfloat16 = -1;

bool fail(PyObject* kind, const char* format, PyObject* value) { return PyErr_Format(kind, format, value), false; }

bool is_given(PyObject* object) { return object != Py_None; }

// ---- arrays ----

bool type_of(PyArrayObject* a, Type& type) {
    int number = PyArray_TYPE(a);
    if (number == NPY_FLOAT) return type = F32, true;
    if (number == NPY_HALF) return type = F16, true;
    if (number == NPY_DOUBLE) return type = F64, true;
    if (number == bfloat16) return type = BF16, true;
    if (number == NPY_VOID && PyArray_ITEMSIZE(a) == BYTES[PARTIAL]) return type = PARTIAL, true;
    if (number >= NPY_USERDEF) {
        PyObject* name = PyObject_GetAttrString((PyObject*)PyArray_DESCR(a), "name");
        bool same = name && PyUnicode_CompareWithASCIIString(name, "bfloat16") == 0;
        Py_XDECREF(name);
        if (same) return bfloat16 = number, type = BF16, true;
    }
    return fail(PyExc_TypeError, "no kernel is for %R", (PyObject*)PyArray_DESCR(a));
}

PyArrayObject* array_of(PyObject* object) {
    if (PyArray_Check(object)) return (PyArrayObject*)object;
    return fail(PyExc_TypeError, "an array is needed, got %R", object), nullptr;
}

// The elements of a vector, or None.
template <class T> bool vector_of(PyObject* object, T*& to, Type* type = nullptr, Index* apart = nullptr) {
    to = nullptr;
    if (!is_given(object)) return true;
    PyArrayObject* a = array_of(object);
    if (!a) return false;
    int ndim = PyArray_NDIM(a);
    bool whole = PyArray_IS_C_CONTIGUOUS(a) || (apart && ndim == 2 && PyArray_STRIDE(a, 1) == PyArray_ITEMSIZE(a));
    if (!whole) return fail(PyExc_ValueError, "a contiguous array is needed, got %R", object);
    if (apart) *apart = PyArray_STRIDE(a, 0);
    to = (T*)PyArray_DATA(a);
    return !type || type_of(a, *type);
}

// Merges neighbouring axes that lie as one, and leaves those of length 1 out; returns how many are left.
int merge_axes(PyArrayObject* a, int first, int stop, Index* lengths, Index* strides) {
    int count = 0;
    for (int k = first; k < stop; k++) {
        Index length = PyArray_DIM(a, k), stride = PyArray_STRIDE(a, k);
        if (length == 1) continue;
        if (count && strides[count - 1] == length * stride) lengths[count - 1] *= length, strides[count - 1] = stride;
        else lengths[count] = length, strides[count++] = stride;
    }
    if (!count) lengths[0] = 1, strides[0] = 0, count = 1;
    return count;
}

// Sees an array as rows; or a tuple of one, how many of its axes count rows, by default all but the last, and the
// numbers of the rows that are meant, or None. None is missing. Of samples, the first axis counts these.
bool see(PyObject* object, Array& to, Index* apart = nullptr) {
    if (!is_given(object)) return true;
    int lead = -1;
    if (PyTuple_Check(object)) {
        PyObject* numbers = PyTuple_GetItem(object, 2);
        if (!vector_of(numbers, to.numbers)) return false;
        if (is_given(numbers)) to.count = PyArray_SIZE((PyArrayObject*)numbers);
        lead = (int)PyLong_AsLong(PyTuple_GetItem(object, 1)), object = PyTuple_GetItem(object, 0);
    }
    PyArrayObject* a = array_of(object);
    if (!a || !type_of(a, to.type)) return false;
    int ndim = PyArray_NDIM(a), start = apart ? 1 : 0;
    if (lead < 0) lead = ndim - 1;
    if (lead > ndim || start > lead) return fail(PyExc_ValueError, "rows are needed, got %R", (PyObject*)a);
    if (apart) *apart = PyArray_STRIDE(a, 0);
    to.data = PyArray_BYTES(a);
    to.lead = merge_axes(a, start, lead, to.lengths, to.strides);
    to.axes = merge_axes(a, lead, ndim, to.lengths + to.lead, to.strides + to.lead);
    Index length = to.lengths[to.lead], stride = to.strides[to.lead];
    to.whole = to.axes == 1 && (length == 1 || stride == BYTES[to.type]);
    if (to.count < 0) to.count = 1;
    else return true;
    for (int k = start; k < lead; k++) to.count *= PyArray_DIM(a, k);
    return true;
}

// ---- memory of large results: NumPy's own way to bring it along ----

// Below, NumPy's cache and malloc do as well.
constexpr Index LARGE = 1 << 20;

void* handler_malloc(void*, size_t size) { return memory::take(size); }
void* handler_calloc(void*, size_t count, size_t size) {
    void* found = size && count > SIZE_MAX / size ? nullptr : memory::take(count * size);
    return found ? memset(found, 0, count * size) : nullptr;
}
void* handler_realloc(void*, void* old, size_t size) { return memory::grow(old, size); }
void handler_free(void*, void* old, size_t) { memory::give(old); }
PyDataMem_Handler handler = {"stablenorm", 1, {nullptr, handler_malloc, handler_calloc, handler_realloc, handler_free}};
PyObject* capsule;

// A new array, a large one in recycled memory: it keeps the handler, and gives its memory to that when it goes.
PyObject* new_array(PyArray_Descr* descr, int ndim, const npy_intp* shape) {
    Index elements = 1;
    for (int k = 0; k < ndim; k++) elements *= shape[k];
    Py_INCREF((PyObject*)descr);
    bool large = elements * (Index)PyDataType_ELSIZE(descr) >= LARGE;
    PyObject* before = large ? PyDataMem_SetHandler(capsule) : nullptr;
    PyObject* array = PyArray_NewFromDescr(&PyArray_Type, descr, ndim, shape, nullptr, nullptr, 0, nullptr);
    if (large) {
        PyObject* ours = PyDataMem_SetHandler(before);
        Py_XDECREF(ours), Py_XDECREF(before);
    }
    return array;
}

// ---- arguments, by position ----

struct Arguments {
    PyObject* const* next;
    PyObject* take() { return *next++; }
    bool flag() { return PyObject_IsTrue(take()) == 1; }
    Index index() { return PyLong_AsSsize_t(take()); }
    double number() { return PyFloat_AsDouble(take()); }
};

// The words of the statistics, in the order of `Statistics`, then marks and the root mean squares of xhat.
bool see_statistics(Arguments& given, Call& c, jobs::Samples& samples) {
    double** words[] = {&c.mean, &c.rest, &c.rstd, &c.rstd_low, &c.tail};
    for (double** each : words)
        if (!vector_of(given.take(), *each)) return false;
    if (!vector_of(given.take(), c.marks) || !vector_of(given.take(), c.spread)) return false;
    samples.statistics = c.rows * (Index)sizeof(double), samples.marks = c.rows;
    return true;
}

// The rows and their length, and how many there are in all if the others are to be cleared.
bool see_rows(Arguments& given, Call& c) {
    c.all_rows = given.index();
    c.rows = c.x.count, c.n = 1;
    for (int k = 0; k < c.x.axes; k++) c.n *= c.x.lengths[c.x.lead + k];
    for (const Array* each : {&c.y, &c.dy, &c.source, &c.plus})
        if (each->data && each->count != c.rows) return fail(PyExc_ValueError, "as many rows are needed%S", PyTuple_New(0));
    return c.n > 0;
}

PyObject* done(Call& c, const jobs::Samples& samples, int threads) {
    if (PyErr_Occurred()) return nullptr;
    // Without results, nothing needs what is said of them.
    if (!c.y.data) c.y.whole = true, c.y.type = c.wide ? F64 : c.x.type, c.y.lead = 1;
    jobs::plan(c);
    Index elements = c.rows * c.n * (samples.count ? samples.count : 1);
    PyThreadState* state = elements >= WORTH_RELEASING ? PyEval_SaveThread() : nullptr;
    jobs::State found = jobs::run(c, samples, threads);
    if (state) PyEval_RestoreThread(state);
    if (found == jobs::NO_MEMORY) return PyErr_NoMemory();
    return PyBool_FromLong(found == jobs::DONE);
}

bool check_count(Py_ssize_t count, Py_ssize_t needed) {
    if (count == needed && jobs::kernels) return true;
    return fail(PyExc_TypeError, "arguments or kernels are missing%S", PyTuple_New(0));
}

PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!check_count(count, 21)) return nullptr;
    Arguments given{args};
    Call c;
    jobs::Samples s;
    s.count = PyLong_AsSsize_t(args[20]);
    auto apart = [&](Index& of) { return s.count ? &of : nullptr; };
    if (!see(given.take(), c.x, apart(s.x)) || !see(given.take(), c.y, apart(s.y))) return nullptr;
    if (!see(given.take(), c.source, apart(s.source)) || !see(given.take(), c.plus, apart(s.plus))) return nullptr;
    if (!vector_of(given.take(), c.gamma, &c.gamma_type, apart(s.gamma))) return nullptr;
    if (!vector_of(given.take(), c.beta, &c.beta_type, apart(s.beta))) return nullptr;
    c.eps = given.number(), c.gamma_offset = given.number();
    c.rms = given.flag(), c.nearest = given.flag(), c.wide = given.flag();
    if (!see_rows(given, c) || !see_statistics(given, c, s)) return nullptr;
    int threads = (int)given.index();
    return done(c, s, threads);
}

PyObject* backward(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!check_count(count, 26)) return nullptr;
    Arguments given{args};
    Call c;
    jobs::Samples s;
    c.backward = true;
    s.count = PyLong_AsSsize_t(args[25]);
    auto apart = [&](Index& of) { return s.count ? &of : nullptr; };
    if (!see(given.take(), c.x, apart(s.x)) || !see(given.take(), c.y, apart(s.y))) return nullptr;
    if (!see(given.take(), c.dy, apart(s.dy)) || !see(given.take(), c.plus, apart(s.plus))) return nullptr;
    if (!vector_of(given.take(), c.gamma, &c.gamma_type, apart(s.gamma))) return nullptr;
    if (!vector_of(given.take(), c.tangents)) return nullptr;
    c.eps = given.number(), c.gamma_offset = given.number();
    c.rms = given.flag(), c.nearest = given.flag(), c.wide = given.flag();
    if (!see_rows(given, c) || !see_statistics(given, c, s)) return nullptr;
    for (int i = 0; i < 2; i++)
        if (!vector_of(given.take(), c.sums_out[i], &c.sums_type[i], apart(s.sums[i]))) return nullptr;
    double *old, *partial;
    if (!vector_of(given.take(), c.undecided[0]) || !vector_of(given.take(), old) || !vector_of(given.take(), partial)) return nullptr;
    c.undecided[1] = c.undecided[0] ? c.undecided[0] + c.n : nullptr;
    if (old) c.old[0] = old, c.old[1] = old + c.n;
    if (partial) c.partial[0] = partial, c.partial[1] = partial + 4 * c.n;
    for (int i = 0; i < 2; i++) s.undecided[i] = 2 * c.n, s.old[i] = 2 * c.n * (Index)sizeof(double);
    int threads = (int)given.index();
    return done(c, s, threads);
}

// ---- the plain call ----

// Norm, Statistics, Cache and Gradients; how a tuple makes one of these of a tuple.
PyObject* types[4];
enum { NORM, STATISTICS, CACHE, GRADIENTS };

PyObject* as_named(int which, PyObject* values) {
    static const newfunc make = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
    PyObject* arguments = values ? PyTuple_Pack(1, values) : nullptr;
    PyObject* found = arguments ? make((PyTypeObject*)types[which], arguments, nullptr) : nullptr;
    Py_XDECREF(arguments), Py_XDECREF(values);
    return found;
}

PyObject* set_types(PyObject*, PyObject* const* args, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count && i < 4; i++) types[i] = Py_NewRef(args[i]);
    return Py_NewRef(Py_None);
}

// An array as most calls have it: NumPy's own, C-contiguous, of 16 or 32 bits in this machine's byte order.
bool is_plain(PyObject* object, Type& type) {
    if (!PyArray_CheckExact(object)) return false;
    PyArrayObject* a = (PyArrayObject*)object;
    if (!PyArray_IS_C_CONTIGUOUS(a) || PyArray_ISBYTESWAPPED(a)) return false;
    bool known = type_of(a, type);
    if (!known) PyErr_Clear();
    return known && type != F64 && type != PARTIAL;
}

bool is_plain_vector(PyObject* object, Index n, const char*& data, Type& type) {
    if (!is_given(object)) return true;
    PyArrayObject* a = (PyArrayObject*)object;
    if (!is_plain(object, type) || PyArray_NDIM(a) != 1 || PyArray_DIM(a, 0) != n) return false;
    return data = PyArray_BYTES(a), true;
}

void see_plain(PyArrayObject* a, Index n, Type type, Array& to) {
    to.data = PyArray_BYTES(a), to.type = type, to.whole = true, to.lead = to.axes = 1;
    to.count = PyArray_SIZE(a) / n, to.lengths[0] = to.count, to.strides[0] = n * BYTES[type];
    to.lengths[1] = n, to.strides[1] = BYTES[type];
}

// What Python's get_num_threads says, asked where there is enough work for it to matter.
int threads_for(Index elements) {
    if (elements < 1 << 13) return 1;
    PyObject* module = PyImport_ImportModule("stablenorm.threads");
    PyObject* found = module ? PyObject_CallMethod(module, "get_num_threads", nullptr) : nullptr;
    int count = found ? (int)PyLong_AsLong(found) : 1;
    Py_XDECREF(module), Py_XDECREF(found);
    return count;
}

// Gamma, beta, eps and the kind of a norm; false if something else is not as by default.
bool see_norm(PyObject* norm, Call& c, PyObject*& gamma, PyObject*& beta) {
    gamma = PyTuple_GetItem(norm, 0), beta = PyTuple_GetItem(norm, 1);
    PyObject *eps = PyTuple_GetItem(norm, 2), *kind = PyTuple_GetItem(norm, 3), *offset = PyTuple_GetItem(norm, 4), *rounding = PyTuple_GetItem(norm, 5);
    if (!rounding || !PyFloat_CheckExact(eps) || !PyFloat_CheckExact(offset) || PyFloat_AsDouble(offset) != 0) return false;
    if (!PyUnicode_CheckExact(rounding) || PyUnicode_CompareWithASCIIString(rounding, "fast") != 0) return false;
    c.eps = PyFloat_AsDouble(eps), c.rms = PyUnicode_CompareWithASCIIString(kind, "rms") == 0;
    return c.eps >= 0 && c.eps < __builtin_inf() && is_plain_vector(gamma, c.n, c.gamma, c.gamma_type) &&
           is_plain_vector(beta, c.n, c.beta, c.beta_type);
}

bool run_plain(Call& c) {
    jobs::plan(c);
    Index elements = c.rows * c.n;
    int threads = threads_for(elements);
    PyThreadState* state = elements >= WORTH_RELEASING ? PyEval_SaveThread() : nullptr;
    jobs::State found = jobs::run(c, {}, threads);
    if (state) PyEval_RestoreThread(state);
    if (found == jobs::NO_MEMORY) PyErr_NoMemory();
    return found == jobs::DONE && !PyErr_Occurred();
}

// y and the cache of a plain forward over the last axis; None, and nothing done, if it is none.
PyObject* plain_forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Call c;
    Type type;
    if (count != 2 || !types[NORM] || !PyTuple_Check(args[1])) return Py_NewRef(Py_None);
    PyArrayObject* x = (PyArrayObject*)args[0];
    if (!is_plain(args[0], type) || !PyArray_NDIM(x) || !PyArray_SIZE(x)) return Py_NewRef(Py_None);
    c.n = PyArray_DIM(x, PyArray_NDIM(x) - 1);
    PyObject *gamma, *beta;
    if (!see_norm(args[1], c, gamma, beta)) return PyErr_Clear(), Py_NewRef(Py_None);
    see_plain(x, c.n, type, c.x);
    c.rows = c.x.count;
    PyObject* y = new_array(PyArray_DESCR(x), PyArray_NDIM(x), PyArray_DIMS(x));
    PyObject* words[8];
    double** places[] = {&c.mean, &c.rest, &c.rstd};
    bool made = y != nullptr;
    for (int i = 0; i < 8; i++) {
        npy_intp rows = c.rows;
        words[i] = i == 2 || (i < 2 && !c.rms) ? PyArray_SimpleNew(1, &rows, NPY_DOUBLE) : Py_NewRef(Py_None);
        made = made && words[i];
        if (words[i] && is_given(words[i])) *places[i] = (double*)PyArray_DATA((PyArrayObject*)words[i]);
    }
    if (made) see_plain((PyArrayObject*)y, c.n, type, c.y), made = run_plain(c);
    PyObject* result = nullptr;
    if (made) {
        PyObject* kept = as_named(STATISTICS, PyTuple_Pack(8, words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7]));
        PyObject* cache = kept ? as_named(CACHE, Py_BuildValue("OO(i)OsOs", args[0], args[1], PyArray_NDIM(x) - 1, kept, "native", Py_None, "x")) : nullptr;
        result = cache ? PyTuple_Pack(2, y, cache) : nullptr;
        Py_XDECREF(kept), Py_XDECREF(cache);
    }
    Py_XDECREF(y);
    for (PyObject* word : words) Py_XDECREF(word);
    return result;
}

// All gradients of a cache of a plain forward; None, and nothing done, if it or dy is none.
PyObject* plain_backward(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Call c;
    Type type, of_dy;
    PyObject* none = Py_None;
    if (count != 2 || !types[NORM] || Py_TYPE(args[1]) != (PyTypeObject*)types[CACHE]) return Py_NewRef(none);
    PyObject *object = PyTuple_GetItem(args[1], 0), *norm = PyTuple_GetItem(args[1], 1), *axes = PyTuple_GetItem(args[1], 2);
    PyObject *kept = PyTuple_GetItem(args[1], 3), *where = PyTuple_GetItem(args[1], 5);
    PyArrayObject *x = (PyArrayObject*)object, *dy = (PyArrayObject*)args[0];
    if (!is_plain(object, type) || !is_plain(args[0], of_dy) || of_dy != type || is_given(where) || is_given(PyTuple_GetItem(kept, 3))) return Py_NewRef(none);
    int ndim = PyArray_NDIM(x);
    if (PyArray_NDIM(dy) != ndim || !ndim || !PyArray_SIZE(x) || memcmp(PyArray_DIMS(x), PyArray_DIMS(dy), (size_t)ndim * sizeof(npy_intp))) return Py_NewRef(none);
    if (PyTuple_Size(axes) != 1 || PyLong_AsLong(PyTuple_GetItem(axes, 0)) != ndim - 1) return Py_NewRef(none);
    c.n = PyArray_DIM(x, ndim - 1), c.backward = true;
    PyObject* parameters[2];
    if (!see_norm(norm, c, parameters[0], parameters[1])) return PyErr_Clear(), Py_NewRef(none);
    see_plain(x, c.n, type, c.x), see_plain(dy, c.n, type, c.dy);
    c.rows = c.x.count;
    double** places[] = {&c.mean, &c.rest, &c.rstd};
    for (int i = c.rms ? 2 : 0; i < 3; i++) {
        PyObject* word = PyTuple_GetItem(kept, i);
        if (!PyArray_CheckExact(word) || PyArray_SIZE((PyArrayObject*)word) != c.rows) return Py_NewRef(none);
        *places[i] = (double*)PyArray_DATA((PyArrayObject*)word);
    }
    PyObject* found[3] = {new_array(PyArray_DESCR(x), ndim, PyArray_DIMS(x)), nullptr, nullptr};
    bool made = found[0] != nullptr;
    for (int i = 0; i < 2; i++) {
        npy_intp n = c.n;
        PyArrayObject* like = (PyArrayObject*)parameters[i];
        found[i + 1] = is_given(parameters[i]) ? new_array(PyArray_DESCR(like), 1, &n) : Py_NewRef(none);
        made = made && found[i + 1];
        if (!made || !is_given(parameters[i])) continue;
        c.sums_out[i] = PyArray_BYTES((PyArrayObject*)found[i + 1]), c.sums_type[i] = i ? c.beta_type : c.gamma_type;
    }
    if (made) see_plain((PyArrayObject*)found[0], c.n, type, c.y), made = run_plain(c);
    PyObject* result = made ? as_named(GRADIENTS, PyTuple_Pack(3, found[0], found[1], found[2])) : nullptr;
    for (PyObject* each : found) Py_XDECREF(each);
    return result;
}

// ---- which kernels ----

PyObject* instructions(PyObject*, PyObject*) {
    PyObject* names = PyList_New(0);
    for (auto each = jobs::available(); names && *each; each++) {
        PyObject* name = PyUnicode_FromString((*each)->name);
        if (name) PyList_Append(names, name), Py_DECREF(name);
    }
    return names;
}

PyObject* use(PyObject*, PyObject* name) {
    for (auto each = jobs::available(); *each; each++)
        if (PyUnicode_CompareWithASCIIString(name, (*each)->name) == 0) return jobs::kernels = *each, Py_NewRef(Py_None);
    return fail(PyExc_ValueError, "no kernels are called %R", name), nullptr;
}

// ---- methods of the module ----

PyObject* empty(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 2 || !PyTuple_Check(args[0])) return fail(PyExc_TypeError, "a shape and a dtype are needed, got %R", Py_None), nullptr;
    npy_intp shape[64];
    int ndim = (int)PyTuple_Size(args[0]);
    for (int k = 0; k < ndim && k < 64; k++) shape[k] = PyLong_AsSsize_t(PyTuple_GetItem(args[0], k));
    return PyErr_Occurred() ? nullptr : new_array((PyArray_Descr*)args[1], ndim, shape);
}

PyObject* idle_bytes(PyObject*, PyObject*) { return PyLong_FromSize_t(memory::idle_bytes()); }
PyObject* set_idle_limit(PyObject*, PyObject* value) {
    size_t limit = PyLong_AsSize_t(value);
    if (PyErr_Occurred()) return nullptr;
    memory::set_limit(limit);
    return Py_NewRef(Py_None);
}

template <class F> PyCFunction as_method(F f) { return (PyCFunction)(void (*)())f; }

PyMethodDef methods[] = {
    {"forward", as_method(forward), METH_FASTCALL, "Normalize rows; False if the call is not for these kernels."},
    {"backward", as_method(backward), METH_FASTCALL, "Pull back rows; False if the call is not for these kernels."},
    {"set_types", as_method(set_types), METH_FASTCALL, "Set the types Norm, Statistics, Cache and Gradients."},
    {"plain_forward", as_method(plain_forward), METH_FASTCALL, "Return y and the cache, or None if the call is not plain."},
    {"plain_backward", as_method(plain_backward), METH_FASTCALL, "Return all gradients, or None if the call is not plain."},
    {"instructions", instructions, METH_NOARGS, "Name the instruction sets that this processor has kernels for."},
    {"use", use, METH_O, "Use the kernels of an instruction set."},
    {"empty", as_method(empty), METH_FASTCALL, "Return a new array, a large one in recycled memory."},
    {"idle_bytes", idle_bytes, METH_NOARGS, "Count the bytes that are kept for results."},
    {"set_idle_limit", set_idle_limit, METH_O, "Set the most bytes that are kept."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_core", "Layer norm and RMS norm of rows.", -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__core(void) {
    import_array();
    jobs::kernels = *jobs::available();
    capsule = PyCapsule_New(&handler, "mem_handler", nullptr);
    PyObject* module = capsule ? PyModule_Create(&definition) : nullptr;
#if defined(Py_GIL_DISABLED)
    if (module) PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
    return module;
}
