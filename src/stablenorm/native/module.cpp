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

using Arguments = PyObject* const*;
PyObject* wrong_count(int needed, Py_ssize_t count) {
    return PyErr_Format(PyExc_TypeError, "%d objects are needed, got %zd", needed, count);
}

PyObject* prepare(PyObject*, Arguments args, Py_ssize_t count) {
    if (count != OBJECTS) return wrong_count(OBJECTS, count);
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
    PyObject* tuple = PyTuple_New(__builtin_popcountll(axes));
    for (Py_ssize_t i = 0; tuple && axes; axes &= axes - 1)
        PyTuple_SetItem(tuple, i++, PyLong_FromLong(__builtin_ctzll(axes)));
    return tuple;
}
// Returns None, unless there is an error.
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
            c.scratch.bytes, c.n);
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

// Arguments of a forward; `total` is an array for the sum of x and the residual.
struct of_forward {
    enum { x, norm, axis, out, backend, keep, residual, where, threads, total, arguments };
};

// The results of a forward: y, the x whose statistics are kept, statistics and marks of rows.
struct Forward {
    PyObject* y;
    PyObject* source;
    PyObject* statistics;
    PyObject* marks;
};

// Sees the arguments; false to decline.
bool see_forward(Arguments args, Call& c) {
    PyObject* x = args[of_forward::x];
    PyObject* norm = args[of_forward::norm];
    PyObject* out = args[of_forward::out];
    PyObject* residual = args[of_forward::residual];
    if (!jobs::kernels || is_given(args[of_forward::where]) ||
        !see_x(x, args[of_forward::axis], c) || !see_norm(norm, x, c) ||
        !see_like_x(residual, x, c, c.plus))
        return false;
    if (!is_given(out)) return true;
    // y may overwrite x if nothing reads x again.
    bool is_over = out == x && !c.nearest && (args[of_forward::keep] != Py_True || c.plus.data);
    PyObject* gamma = field(norm, of_norm::gamma);
    PyObject* beta = field(norm, of_norm::beta);
    return can_take(out, x, {is_over ? Py_None : x, gamma, beta, residual}) &&
           see_results(out, c, c.y);
}

// Makes the arrays; false with an error, or to decline.
bool make_forward(Arguments args, Call& c, Owned& own, Forward& made) {
    PyArrayObject* x = (PyArrayObject*)args[of_forward::x];
    made.y = own(result_like(args[of_forward::out], x));
    made.source = c.plus.data ? own(result_like(args[of_forward::total], x)) : (PyObject*)x;
    if (!made.y || !made.source) return false;
    if (c.plus.data) {
        c.source = c.x;
        if (!see_rows(made.source, c.axes, c.x)) return false;
    }
    if (!see_rows(made.y, c.axes, c.y)) return false;
    c.over = c.y.data == c.x.data;
    bool keep = args[of_forward::keep] == Py_True;
    made.marks = c.has_pairs() ? own(new_vector(c.rows, NPY_UINT8, c.marks)) : Py_None;
    made.statistics = keep ? own(new_statistics(c, words_of(c))) : Py_None;
    return made.marks && made.statistics;
}

// Returns y and the cache, or None.
PyObject* forward(PyObject*, Arguments args, Py_ssize_t count) {
    if (count != of_forward::arguments) return wrong_count(of_forward::arguments, count);
    Call c;
    Owned own;
    Forward made;
    if (!see_forward(args, c) || !make_forward(args, c, own, made)) return declined();
    jobs::State state = run(c, args[of_forward::threads]);
    if (!is_done(state)) return declined();
    PyObject* norm = args[of_forward::norm];
    PyObject* statistics = made.statistics;
    bool keep = is_given(statistics);
    if (keep) statistics = own(as_named(STATISTICS, Py_NewRef(statistics)));
    PyObject* axes = own(named_axes(c.axes));
    if (!statistics || !axes) return nullptr;
    if (has_any(c.marks, c.rows) &&
        !finish(FINISH_FORWARD, "OOOOOO", made.source, made.y, norm, statistics, made.marks, axes))
        return nullptr;
    if (state == jobs::OVERFLOWED &&
        !finish(REPEAT_FORWARD, "OOOO", made.source, made.y, norm, axes))
        return nullptr;
    if (!keep) return PyTuple_Pack(2, made.y, Py_None);
    PyObject* backend = own(PyUnicode_FromString("native"));
    PyObject* fields = backend ? PyTuple_Pack(of_cache::fields, made.source, norm, axes, statistics,
                                     backend, Py_None)
                               : nullptr;
    PyObject* cache = own(as_named(CACHE, fields));
    return cache ? PyTuple_Pack(2, made.y, cache) : nullptr;
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

// Arguments of a backward; `unrounded` is an array of float64, (2, n, 3), for partial sums instead
// of dgamma and dbeta.
struct of_backward {
    enum { dy, cache, kind, wrt, out, dsum, threads, unrounded, arguments };
};

// What a backward reads of the cache, what is wanted, and what it makes: gradients of x, gamma and
// beta, marks of rows, uncertified columns, partial sums.
struct Backward {
    PyObject* x;
    PyObject* norm;
    bool wanted[3] = {};
    PyObject* gradients[3] = {Py_None, Py_None, Py_None};
    PyObject* marks = Py_None;
    PyObject* uncertified = Py_None;
    PyObject* partial = Py_None;
};

// Sees the arguments; false to decline.
bool see_backward(Arguments args, Call& c, Backward& made) {
    PyObject* cache = args[of_backward::cache];
    PyObject* out = args[of_backward::out];
    c.backward = true;
    c.unrounded = is_given(args[of_backward::unrounded]);
    if (!jobs::kernels || !see_names(args[of_backward::wrt], made.wanted)) return false;
    if (!see_cache(cache, args[of_backward::kind], c)) {
        PyErr_Clear();
        return false;
    }
    made.x = field(cache, of_cache::x);
    made.norm = field(cache, of_cache::norm);
    return see_like_x(args[of_backward::dy], made.x, c, c.dy) && c.dy.data &&
           see_like_x(args[of_backward::dsum], made.x, c, c.plus) &&
           (!is_given(out) || (PyTuple_Check(out) && PyTuple_Size(out) == 3));
}

// Makes the gradients that are wanted; false with an error, or to decline an out of another shape
// or dtype, that overlaps, or whose gradient is not wanted: `functional` reports it.
bool make_gradients(Arguments args, Call& c, Owned& own, Backward& made) {
    PyObject* out = args[of_backward::out];
    PyObject* dy = args[of_backward::dy];
    PyObject* gamma = field(made.norm, of_norm::gamma);
    PyObject* likes[] = {made.x, gamma, field(made.norm, of_norm::beta)};
    for (int i = 0; i < 3; i++) {
        PyObject*& gradient = made.gradients[i];
        PyObject* target = is_given(out) ? field(out, i) : Py_None;
        if (is_given(target)) {
            // dx may overwrite dy if nothing reads dy again.
            bool is_over = target == dy && i == 0 && !c.nearest && c.x.type != F64;
            if (!made.wanted[i] ||
                !can_take(target, likes[i],
                    {made.x, gamma, is_over ? Py_None : dy, args[of_backward::dsum],
                        made.gradients[0], made.gradients[1]}))
                return false;
        }
        if (!made.wanted[i] || !is_given(likes[i]) || (i > 0 && c.unrounded)) continue;
        gradient = own(result_like(target, (PyArrayObject*)likes[i]));
        if (!gradient) return false;
    }
    c.y.type = c.x.type;
    if (is_given(made.gradients[0]) && !see_results(made.gradients[0], c, c.y)) return false;
    c.over = c.y.data && c.y.data == c.dy.data && !c.has_pairs();
    return true;
}

// Sees where the sums over rows go; false to decline.
bool see_sums(Arguments args, Call& c, Backward& made) {
    if (c.unrounded) {
        made.partial = args[of_backward::unrounded];
        PyArrayObject* sums = (PyArrayObject*)made.partial;
        if (!PyArray_CheckExact(made.partial) || PyArray_TYPE(sums) != NPY_DOUBLE ||
            !PyArray_ISCARRAY(sums) || PyArray_SIZE(sums) != 6 * c.n)
            return false;
        c.partial[0] = (double*)PyArray_DATA(sums);
        c.partial[1] = c.partial[0] + 3 * c.n;
    }
    for (int i = 0; i < 2; i++) {
        PyArrayObject* sums = (PyArrayObject*)made.gradients[1 + i];
        if (c.unrounded && made.wanted[1 + i]) c.sums_out[i] = (char*)c.partial[0];
        if (!is_given(made.gradients[1 + i])) continue;
        // Sums over rows are one behind the other.
        if (!is_of_floats(made.gradients[1 + i], c.sums_type[i]) || !PyArray_IS_C_CONTIGUOUS(sums))
            return false;
        c.sums_out[i] = PyArray_BYTES(sums);
        // Sums that overflow are computed again from dy: mostly those of a narrower range than its
        // own.
        if (c.over && c.sums_type[i] == F16 && c.x.type != F16) return false;
    }
    return true;
}

// Makes marks of rows and of columns; false with an error.
bool make_marks(Call& c, Owned& own, Backward& made) {
    if (!c.has_pairs() && !c.over) return true;
    made.marks = own(new_vector(c.rows, NPY_UINT8, c.marks));
    if (!made.marks) return false;
    // Rows that the forward found out of range have no rstd_lo.
    auto is_lost = [&](Index i) {
        return c.rstd_lo && c.rstd_lo[i] != c.rstd_lo[i] && c.rstd[i] == c.rstd[i];
    };
    for (Index i = 0; i < c.rows; i++) c.marks[i] = is_lost(i) ? UNCERTIFIED | UNSUMMED : 0;
    if (!c.has_pairs()) return true;
    made.uncertified = own(new_vector(2 * c.n, NPY_UINT8, c.uncertified[0]));
    if (!made.uncertified) return false;
    memset(c.uncertified[0], 0, (size_t)(2 * c.n));
    c.uncertified[1] = c.uncertified[0] + c.n;
    return true;
}

// Takes the partial sums that a call with unsummed rows made; false with an error.
bool take_partial(Call& c, Owned& own, Backward& made) {
    if (c.unrounded || !c.partial[0]) return true;
    double* copy;
    made.partial = own(new_vector(6 * c.n, NPY_DOUBLE, copy));
    if (made.partial) memcpy(copy, c.partial[0], (size_t)(6 * c.n) * sizeof(double));
    memory::give(c.partial[0]);
    return made.partial;
}

// Returns the gradients, or None.
PyObject* backward(PyObject*, Arguments args, Py_ssize_t count) {
    if (count != of_backward::arguments) return wrong_count(of_backward::arguments, count);
    Call c;
    Owned own;
    Backward made;
    if (!see_backward(args, c, made) || !make_gradients(args, c, own, made) ||
        !see_sums(args, c, made) || !make_marks(c, own, made))
        return declined();
    jobs::State state = run(c, args[of_backward::threads]);
    if (!is_done(state)) return declined();
    if (!take_partial(c, own, made)) return nullptr;
    PyObject** of = made.gradients;
    PyObject* gradients = own(as_named(GRADIENTS, PyTuple_Pack(3, of[0], of[1], of[2])));
    if (!gradients) return nullptr;
    PyObject* dy = args[of_backward::dy];
    PyObject* dsum = args[of_backward::dsum];
    PyObject* axes = field(args[of_backward::cache], of_cache::axis);
    PyObject* statistics = field(args[of_backward::cache], of_cache::statistics);
    bool unfinished =
        c.has_pairs() && (has_any(c.marks, c.rows) || has_any(c.uncertified[0], 2 * c.n));
    if (unfinished &&
        !finish(FINISH_BACKWARD, "OOOOOOOOOOi", dy, made.x, made.norm, statistics, gradients, dsum,
            axes, made.marks, made.uncertified, made.partial, (int)c.unrounded))
        return nullptr;
    if (state == jobs::OVERFLOWED && !finish(REPEAT_BACKWARD, "OOOOOOO", dy, made.x, made.norm,
                                         gradients, dsum, axes, made.marks))
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

PyObject* empty(PyObject*, Arguments args, Py_ssize_t count) {
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
PyObject* call(PyObject*, Arguments args, Py_ssize_t count) {
    if (count != 3) return wrong_count(3, count);
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
