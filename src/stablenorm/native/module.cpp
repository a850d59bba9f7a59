// The functions that Python calls. They do calls of plain rows with the keywords that kernels have,
// and decline others with None: `functional` makes these plain. Functions of `native/__init__.py`
// finish uncertified rows and columns before a call returns.
#include "arrays.h"

namespace {

// Least elements of a call that releases the GIL, and of one that asks how many threads there are.
constexpr Index WORTH_RELEASING = 1 << 14;
constexpr Index WORTH_SHARING = 1 << 13;

// ---- objects that Python hands over once ----

enum {
    NORM,
    CACHE,
    STATISTICS,
    GRADIENTS,
    GET_NUM_THREADS,
    FINISH_FORWARD,
    FINISH_BACKWARD,
    REPEAT_FORWARD,
    REPEAT_BACKWARD,
    DEFAULT_LIMIT,
    SCALAR_TYPES,
    OBJECTS = SCALAR_TYPES + 4
};
PyObject* python_objects[OBJECTS];

// The fields of Python's named tuples, in their order.
struct of_norm {
    enum { gamma, beta, eps, kind, gamma_offset, rounding, fields };
};
struct of_cache {
    enum { x, norm, axis, statistics, backend, where, fields };
};
struct of_statistics {
    enum { mean, mean_lo, rstd, rstd_lo, mean_tail, spread, exponent, fields };
};
constexpr size_t WORDS = of_statistics::exponent;  // float64 vectors

PyObject* prepare(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != OBJECTS)
        return PyErr_Format(PyExc_TypeError, "%d objects are needed, got %zd", OBJECTS, count);
    for (int i = 0; i < OBJECTS; i++) python_objects[i] = Py_NewRef(args[i]);
    default_limit = Py_NewRef(args[DEFAULT_LIMIT]);
    for (int i = 0; i < 4; i++) scalar_types[i] = python_objects[SCALAR_TYPES + i];
    return Py_NewRef(Py_None);
}

// ---- Python's objects ----

// Set while a thread takes the GIL back: if Python ends meanwhile, a daemon thread is unwound from
// there, without the GIL.
thread_local bool without_gil;

// References that are dropped together.
struct Owned {
    PyObject* all[16];
    int count = 0;
    PyObject* operator()(PyObject* object) { return all[count++] = object; }
    ~Owned() {
        while (count && !without_gil) Py_XDECREF(all[--count]);
    }
};

PyObject* field(PyObject* tuple, Py_ssize_t i) { return PyTuple_GetItem(tuple, i); }
// Whether an object is one of Python's named tuples, of its length: a user may build any.
bool is_record(PyObject* object, int type, Py_ssize_t fields) {
    return Py_TYPE(object) == (PyTypeObject*)python_objects[type] && PyTuple_Size(object) == fields;
}
bool is_word(PyObject* object, const char* word) {
    return PyUnicode_CheckExact(object) && PyUnicode_CompareWithASCIIString(object, word) == 0;
}
template <class T> bool has_any(const T* v, Index count) {
    bool any = false;
    for (Index i = 0; v && i < count; i++) any |= v[i] != 0;
    return any;
}
// The axes of a cache, in order.
PyObject* named_axes(uint64_t axes) {
    PyObject* list = PyList_New(0);
    for (int k = 0; list && k < 64; k++) {
        PyObject* number = axes >> k & 1 ? PyLong_FromLong(k) : nullptr;
        if (number) PyList_Append(list, number);
        Py_XDECREF(number);
    }
    PyObject* tuple = list ? PyList_AsTuple(list) : nullptr;
    Py_XDECREF(list);
    return tuple;
}
PyObject* declined() { return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None); }

// Makes a named tuple of the values, whose reference it takes.
PyObject* as_named(int type, PyObject* values) {
    static const newfunc make = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
    Owned own;
    PyObject* arguments = own(values) ? own(PyTuple_Pack(1, values)) : nullptr;
    return arguments ? make((PyTypeObject*)python_objects[type], arguments, nullptr) : nullptr;
}

// ---- both directions ----

// Gamma or beta: the lengths of the normalized axes of x, maybe after axes of 1.
bool see_parameter(
    PyObject* object, PyArrayObject* x, const Call& c, const char*& data, Type& type) {
    if (!is_given(object)) return true;
    PyArrayObject* a = (PyArrayObject*)object;
    if (!is_of_floats(object, type) || PyArray_NDIM(a) > c.ndim || PyArray_SIZE(a) != c.n)
        return false;
    int k = PyArray_NDIM(a);
    Index step = BYTES[type];
    for (int axis = c.ndim - 1; axis >= 0; axis--) {
        if (!(c.axes >> axis & 1)) continue;
        Index length = PyArray_DIM(x, axis);
        if (--k < 0 || PyArray_DIM(a, k) != length || (length > 1 && PyArray_STRIDE(a, k) != step))
            return false;
        step *= length;
    }
    data = PyArray_BYTES(a);
    return true;
}

bool see_norm(PyObject* of, PyObject* x, Call& c) {
    if (!is_record(of, NORM, of_norm::fields)) return false;
    PyObject* eps = field(of, of_norm::eps);
    PyObject* offset = field(of, of_norm::gamma_offset);
    if (!PyFloat_CheckExact(eps) || !PyFloat_CheckExact(offset) || PyFloat_AsDouble(offset) != 0)
        return false;
    c.eps = PyFloat_AsDouble(eps);
    c.rms = is_word(field(of, of_norm::kind), "rms");
    c.nearest = is_word(field(of, of_norm::rounding), "nearest");
    bool known = c.nearest || is_word(field(of, of_norm::rounding), "fast");
    PyArrayObject* like = (PyArrayObject*)x;
    return known && c.eps >= 0 && c.eps <= __DBL_MAX__ &&
           see_parameter(field(of, of_norm::gamma), like, c, c.gamma, c.gamma_type) &&
           see_parameter(field(of, of_norm::beta), like, c, c.beta, c.beta_type);
}

bool see_x(PyObject* object, PyObject* axis, Call& c) {
    if (!is_of_floats(object, c.x.type)) return false;
    PyArrayObject* x = (PyArrayObject*)object;
    c.ndim = PyArray_NDIM(x);
    c.axes = axes_of(axis, c.ndim);
    c.n = 1;
    for (int k = 0; k < c.ndim; k++) c.n *= c.axes >> k & 1 ? PyArray_DIM(x, k) : 1;
    c.rows = PyArray_SIZE(x) / c.n;
    return c.axes && see_rows(object, c.axes, c.x);
}

// Sees another array of the shape and dtype of x; None leaves `rows` empty.
bool see_like_x(PyObject* object, PyObject* x, const Call& c, Rows& rows) {
    return !is_given(object) || (see_rows(object, c.axes, rows) && rows.type == c.x.type &&
                                    PyArray_SAMESHAPE((PyArrayObject*)object, (PyArrayObject*)x));
}

// The float64 vectors of the statistics that a call has, in the order of `of_statistics`; null for
// others.
using Words = std::array<double**, WORDS>;
Words words_of(Call& c) {
    bool layer = !c.rms;
    bool wide = c.x.type == F64;
    return {layer ? &c.mean : nullptr, layer ? &c.mean_lo : nullptr, &c.rstd,
        wide ? &c.rstd_lo : nullptr, layer && wide ? &c.mean_tail : nullptr,
        c.nearest ? &c.spread : nullptr};
}

// Runs a call. It is done but for marked rows and uncertified columns, or OVERFLOWED, or nothing is
// written.
jobs::State run(Call& c, PyObject* threads) {
    Index elements = c.rows * c.n;
    int count = 1;
    if (elements >= WORTH_SHARING) {
        Owned own;
        PyObject* number =
            is_given(threads) ? threads : own(PyObject_CallNoArgs(python_objects[GET_NUM_THREADS]));
        int overflow = 0;
        long long asked = number ? PyLong_AsLongLongAndOverflow(number, &overflow) : 1;
        if (PyErr_Occurred()) return jobs::DECLINED;
        count = overflow > 0 || asked > pool::MOST ? pool::MOST : asked < 1 ? 1 : (int)asked;
    }
    PyThreadState* state = elements >= WORTH_RELEASING ? PyEval_SaveThread() : nullptr;
    without_gil = state;
    jobs::State ended = jobs::run(c, count);
    if (state) PyEval_RestoreThread(state);
    without_gil = false;
    if (ended == jobs::NO_MEMORY)
        PyErr_Format(PyExc_MemoryError,
            "%zd bytes of scratch memory are needed for rows of %zd elements, and could not be had",
            c.scratch_bytes, c.n);
    return ended;
}
bool is_done(jobs::State state) { return state == jobs::DONE || state == jobs::OVERFLOWED; }

// Calls a function of native/__init__.py that finishes a call.
template <class... Of> bool finish(int function, const char* format, Of... of) {
    pool::DefaultControl control;
    Owned own;
    return own(PyObject_CallFunction(python_objects[function], format, of...));
}

// ---- forward ----

PyObject* new_statistics(const Call& c, const Words& words) {
    PyObject* statistics = PyTuple_New(of_statistics::fields);
    for (int i = 0; statistics && i < of_statistics::fields; i++) {
        double** place = (size_t)i < WORDS ? words[(size_t)i] : nullptr;
        PyObject* word = place ? new_vector(c.rows, NPY_DOUBLE, *place) : Py_NewRef(Py_None);
        if (!word || PyTuple_SetItem(statistics, i, word) < 0) {
            Py_DECREF(statistics);
            return nullptr;
        }
    }
    return statistics;
}

// Arguments: x, norm, axis, out, backend, keep, residual, where, threads, and an array for the sum
// of x and the residual. Returns y and the cache, or None.
PyObject* forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
    enum { X, OF_NORM, AXIS, OUT, BACKEND, KEEP, RESIDUAL, WHERE, THREADS, TOTAL, ALL };
    if (count != ALL)
        return PyErr_Format(PyExc_TypeError, "%d arguments are needed, got %zd", ALL, count);
    Call c;
    PyObject* out = args[OUT];
    PyObject* total = args[TOTAL];
    PyObject* norm = args[OF_NORM];
    bool keep = args[KEEP] == Py_True;
    if (!jobs::kernels || is_given(args[WHERE]) || !see_x(args[X], args[AXIS], c))
        return declined();
    if (!see_norm(norm, args[X], c) || !see_like_x(args[RESIDUAL], args[X], c, c.plus))
        return declined();
    PyArrayObject* x = (PyArrayObject*)args[X];
    if (is_given(out)) {
        // y may overwrite x if nothing reads x again.
        bool is_over = out == args[X] && !c.nearest && (!keep || c.plus.data);
        PyObject* gamma = field(norm, of_norm::gamma);
        PyObject* beta = field(norm, of_norm::beta);
        if (!is_room(out, args[X], {is_over ? Py_None : args[X], gamma, beta, args[RESIDUAL]}) ||
            !see_room(out, c, c.y))
            return declined();
    }
    Owned own;
    PyObject* y = own(result_like(out, x));
    if (c.plus.data) total = own(result_like(total, x));
    if (!y || !total) return nullptr;
    if (c.plus.data) {
        c.source = c.x;
        if (!see_rows(total, c.axes, c.x)) return declined();
    }
    if (!see_rows(y, c.axes, c.y)) return declined();
    c.in_pairs = c.x.type == F64 || c.y.type == F64;
    c.over = c.y.data == c.x.data;
    PyObject* marks = c.pairs() ? own(new_vector(c.rows, NPY_UINT8, c.marks)) : y;
    PyObject* statistics = keep ? own(new_statistics(c, words_of(c))) : Py_None;
    if (!marks || !statistics) return nullptr;
    jobs::plan(c);
    jobs::State state = run(c, args[THREADS]);
    if (!is_done(state)) return declined();
    if (keep) statistics = own(as_named(STATISTICS, Py_NewRef(statistics)));
    PyObject* source = c.plus.data ? total : args[X];
    PyObject* axes = own(named_axes(c.axes));
    if (!statistics || !axes) return nullptr;
    if (has_any(c.marks, c.rows) &&
        !finish(FINISH_FORWARD, "OOOOOO", source, y, norm, statistics, marks, axes))
        return nullptr;
    if (state == jobs::OVERFLOWED && !finish(REPEAT_FORWARD, "OOOO", source, y, norm, axes))
        return nullptr;
    if (!keep) return PyTuple_Pack(2, y, Py_None);
    PyObject* backend = own(PyUnicode_FromString("native"));
    if (!backend) return nullptr;
    PyObject* cache = own(as_named(
        CACHE, PyTuple_Pack(of_cache::fields, source, norm, axes, statistics, backend, Py_None)));
    return cache ? PyTuple_Pack(2, y, cache) : nullptr;
}

// ---- backward ----

// The statistics of a cache of a forward of plain rows.
bool see_cache(PyObject* of, PyObject* kind, Call& c) {
    if (!is_record(of, CACHE, of_cache::fields) || is_given(field(of, of_cache::where)) ||
        !is_word(field(of, of_cache::backend), "native"))
        return false;
    PyObject* x = field(of, of_cache::x);
    PyObject* axes = field(of, of_cache::axis);
    PyObject* statistics = field(of, of_cache::statistics);
    if (!is_record(statistics, STATISTICS, of_statistics::fields) || !PyTuple_Check(axes) ||
        !see_x(x, axes, c) || !see_norm(field(of, of_cache::norm), x, c) ||
        !is_word(kind, c.rms ? "rms" : "layer"))
        return false;
    Words words = words_of(c);
    for (size_t i = 0; i < WORDS; i++) {
        PyArrayObject* word = (PyArrayObject*)field(statistics, (Py_ssize_t)i);
        if (!words[i]) continue;
        bool usable = PyArray_CheckExact((PyObject*)word) && PyArray_TYPE(word) == NPY_DOUBLE &&
                      PyArray_ISCARRAY_RO(word);
        if (!usable || PyArray_SIZE(word) != c.rows) return false;
        *words[i] = (double*)PyArray_DATA(word);
    }
    return true;
}

// Sees which of x, gamma and beta a tuple names; false if it has anything else.
bool see_names(PyObject* names, bool (&wanted)[3]) {
    const char* known[] = {"x", "gamma", "beta"};
    if (!PyTuple_Check(names)) return false;
    Py_ssize_t found = 0;
    Py_ssize_t count = PyTuple_Size(names);
    for (Py_ssize_t k = 0; k < count; k++)
        for (int i = 0; i < 3; i++)
            if (is_word(field(names, k), known[i])) {
                wanted[i] = true;
                found++;
            }
    return found == count;
}

// Arguments: dy, a cache, the kind of norm, wrt, out, dsum, threads, and an array of float64, (2,
// n, 3), for partial sums instead of dgamma and dbeta. Returns the gradients, or None.
PyObject* backward(PyObject*, PyObject* const* args, Py_ssize_t count) {
    enum { DY, OF_CACHE, KIND, WRT, OUT, DSUM, THREADS, UNROUNDED, ALL };
    if (count != ALL)
        return PyErr_Format(PyExc_TypeError, "%d arguments are needed, got %zd", ALL, count);
    Call c;
    c.backward = true;
    c.unrounded = is_given(args[UNROUNDED]);
    bool wanted[3] = {};
    if (!jobs::kernels || !see_names(args[WRT], wanted)) return declined();
    if (!see_cache(args[OF_CACHE], args[KIND], c)) {
        PyErr_Clear();
        return declined();
    }
    PyObject* x = field(args[OF_CACHE], of_cache::x);
    PyObject* norm = field(args[OF_CACHE], of_cache::norm);
    PyObject* axes = field(args[OF_CACHE], of_cache::axis);
    PyObject* out = args[OUT];
    PyObject* dy = args[DY];
    if (!see_like_x(dy, x, c, c.dy) || !c.dy.data || !see_like_x(args[DSUM], x, c, c.plus))
        return declined();
    if (is_given(out) && !(PyTuple_Check(out) && PyTuple_Size(out) == 3)) return declined();

    Owned own;
    PyObject* likes[] = {x, field(norm, of_norm::gamma), field(norm, of_norm::beta)};
    PyObject* results[] = {Py_None, Py_None, Py_None};
    for (int i = 0; i < 3; i++) {
        PyObject* target = is_given(out) ? field(out, i) : Py_None;
        // Decline an out of another shape or dtype, that overlaps, or whose gradient is not wanted:
        // `functional` reports it.
        if (is_given(target) && !wanted[i]) return declined();
        // dx may overwrite dy if nothing reads dy again.
        PyObject* read = target == dy && i == 0 && !c.nearest && c.x.type != F64 ? Py_None : dy;
        if (is_given(target) &&
            !is_room(target, likes[i], {x, likes[1], read, args[DSUM], results[0], results[1]}))
            return declined();
        if (!wanted[i] || !is_given(likes[i]) || (i > 0 && c.unrounded)) continue;
        results[i] = own(result_like(target, (PyArrayObject*)likes[i]));
        if (!results[i]) return nullptr;
    }
    Index columns = 2 * c.n;
    PyObject* none = Py_None;
    PyObject* marks = none;
    PyObject* uncertified = none;
    PyObject* partial = none;
    PyObject* statistics = field(args[OF_CACHE], of_cache::statistics);
    c.y.type = c.x.type;
    if (is_given(results[0]) && !see_room(results[0], c, c.y)) return declined();
    c.in_pairs = c.x.type == F64 || c.y.type == F64;
    if (c.unrounded) {
        PyArrayObject* sums = (PyArrayObject*)(partial = args[UNROUNDED]);
        if (!PyArray_CheckExact(partial) || PyArray_TYPE(sums) != NPY_DOUBLE ||
            !PyArray_ISCARRAY(sums) || PyArray_SIZE(sums) != 3 * columns)
            return declined();
        c.partial[0] = (double*)PyArray_DATA(sums);
    }
    for (int i = 0; i < 2; i++) {
        // Sums over rows are one behind the other.
        PyArrayObject* sums = (PyArrayObject*)results[1 + i];
        if (c.unrounded && wanted[1 + i]) c.sums_out[i] = (char*)c.partial[0];
        if (!is_given(results[1 + i])) continue;
        if (!is_of_floats(results[1 + i], c.sums_type[i]) || !PyArray_IS_C_CONTIGUOUS(sums))
            return declined();
        c.sums_out[i] = PyArray_BYTES(sums);
    }
    c.over = c.y.data && c.y.data == c.dy.data && !c.pairs();
    // Sums that overflow are computed again from dy: mostly those of a narrower range than its own.
    for (int i = 0; c.over && i < 2; i++)
        if (c.sums_out[i] && c.sums_type[i] == F16 && c.x.type != F16) return declined();
    if (c.over && !(marks = own(new_vector(c.rows, NPY_UINT8, c.marks)))) return nullptr;
    if (c.pairs()) {
        marks = own(new_vector(c.rows, NPY_UINT8, c.marks));
        uncertified = own(new_vector(columns, NPY_UINT8, c.uncertified[0]));
        if (!marks || !uncertified) return nullptr;
        memset(c.uncertified[0], 0, (size_t)columns);
        c.uncertified[1] = c.uncertified[0] + c.n;
        // Rows that the forward found out of range have no rstd_lo.
        for (Index i = 0; i < c.rows; i++)
            c.marks[i] = c.rstd_lo && c.rstd_lo[i] != c.rstd_lo[i] && c.rstd[i] == c.rstd[i]
                             ? UNCERTIFIED | UNSUMMED
                             : 0;
    }
    if (c.partial[0]) c.partial[1] = c.partial[0] + 3 * c.n;
    jobs::plan(c);
    jobs::State state = run(c, args[THREADS]);
    if (!is_done(state)) return declined();
    if (c.partial[0] && !c.unrounded) {
        double* copy;
        partial = own(new_vector(3 * columns, NPY_DOUBLE, copy));
        if (partial) memcpy(copy, c.partial[0], (size_t)(3 * columns) * sizeof(double));
        memory::give((char*)c.partial[0]);
        if (!partial) return nullptr;
    }
    PyObject* gradients =
        own(as_named(GRADIENTS, PyTuple_Pack(3, results[0], results[1], results[2])));
    if (!gradients) return nullptr;
    bool unfinished = c.pairs() && (has_any(c.marks, c.rows) || has_any(c.uncertified[0], columns));
    if (unfinished && !finish(FINISH_BACKWARD, "OOOOOOOOOOi", dy, x, norm, statistics, gradients,
                          args[DSUM], axes, marks, uncertified, partial, (int)c.unrounded))
        return nullptr;
    if (state == jobs::OVERFLOWED &&
        !finish(REPEAT_BACKWARD, "OOOOOOO", dy, x, norm, gradients, args[DSUM], axes, marks))
        return nullptr;
    return Py_NewRef(gradients);
}

// ---- which kernels ----

PyObject* instructions(PyObject*, PyObject*) {
    PyObject* names = PyList_New(0);
    for (auto each = jobs::available(); names && *each; each++) {
        PyObject* name = PyUnicode_FromString((*each)->name);
        if (name) {
            PyList_Append(names, name);
            Py_DECREF(name);
        }
    }
    return names;
}

PyObject* use(PyObject*, PyObject* name) {
    for (auto each = jobs::available(); *each; each++)
        if (PyUnicode_CompareWithASCIIString(name, (*each)->name) == 0) {
            jobs::kernels = *each;
            return Py_NewRef(Py_None);
        }
    return PyErr_Format(PyExc_ValueError, "no kernels are called %R", name);
}

// ---- methods of the module ----

PyObject* empty(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 2 || !PyTuple_Check(args[0]) || PyTuple_Size(args[0]) > 64)
        return PyErr_Format(
            PyExc_TypeError, "a shape and a dtype are needed, got %zd objects", count);
    npy_intp shape[64];
    int ndim = (int)PyTuple_Size(args[0]);
    for (int k = 0; k < ndim && k < 64; k++)
        shape[k] = PyLong_AsSsize_t(PyTuple_GetItem(args[0], k));
    return PyErr_Occurred() ? nullptr : new_array((PyArray_Descr*)args[1], ndim, shape);
}

// Calls a Python function with the default control word: call(function, arguments, keywords).
PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 3) return PyErr_Format(PyExc_TypeError, "3 arguments are needed, got %zd", count);
    pool::DefaultControl control;
    return PyObject_Call(args[0], args[1], args[2]);
}

PyObject* idle_bytes(PyObject*, PyObject*) { return PyLong_FromSize_t(memory::idle_bytes()); }
PyObject* set_idle_limit(PyObject*, PyObject* value) {
    return set_limit(value) ? Py_NewRef(Py_None) : nullptr;
}

template <class F> PyCFunction as_method(F f) { return (PyCFunction)(void (*)())f; }

PyMethodDef methods[] = {
    {"forward", as_method(forward), METH_FASTCALL,
        "Return y and the cache, or None if the call is not for these kernels."},
    {"backward", as_method(backward), METH_FASTCALL,
        "Return the gradients, or None if the call is not for these kernels."},
    {"prepare", as_method(prepare), METH_FASTCALL, "Take what the calls need of Python, once."},
    {"instructions", instructions, METH_NOARGS,
        "Name the instruction sets that this processor has kernels for."},
    {"use", use, METH_O, "Use the kernels of an instruction set."},
    {"empty", as_method(empty), METH_FASTCALL,
        "Return a new array, a large one in recycled memory."},
    {"call", as_method(call), METH_FASTCALL, "Call a function with the default control word."},
    {"idle_bytes", idle_bytes, METH_NOARGS, "Count the bytes that are kept for results."},
    {"set_idle_limit", set_idle_limit, METH_O, "Set the most bytes that are kept."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_core", "Layer norm and RMS norm of rows.", -1,
    methods, nullptr, nullptr, nullptr, nullptr};

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
