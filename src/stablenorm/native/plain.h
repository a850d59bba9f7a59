// The plain call: NumPy's own contiguous arrays, the last axis, no keyword but those of the norm and `out`. It is done
// here, as functional/ would do it by way of a record, or declined: before anything is touched, or with pairs if a
// row or a column is for the reference, which then writes all anew.
#pragma once
#include "arrays.h"

namespace {

// Elements of a call that others may run beside, and of one that threads share: for less, to release the GIL and to
// ask how many threads there are is a waste.
constexpr Index WORTH_RELEASING = 1 << 14, WORTH_SHARING = 1 << 13;

// What Python hands over once: types, the default of `wrt`, and get_num_threads.
enum { STATISTICS, CACHE, GRADIENTS, ALL_NAMES, GET_NUM_THREADS, GIVEN };
PyObject* given_once[GIVEN];

// The fields of the tuples of types.py and functional/.
namespace norm { enum { GAMMA, BETA, EPS, KIND, OFFSET, ROUNDING, FIELDS }; }
namespace cache { enum { X, NORM, AXIS, STATISTICS, BACKEND, WHERE, FIELDS }; }
namespace stats { enum { MEAN, MEAN_LO, RSTD, RSTD_LO, MEAN_TAIL, EXPONENT, SPREAD, EXTREME, FIELDS }; }
namespace ahead { enum { AXIS, OUT, BACKEND, KEEP, RESIDUAL, WHERE, THREADS, FIELDS }; }
namespace back { enum { WRT, OUT, DSUM, SUM_AXES, DMEAN, DRSTD, ACCUMULATE, THREADS, FIELDS }; }

// While a thread takes the GIL back: where Python ends meanwhile, a daemon thread is unwound from there, without it.
thread_local bool without_gil;

// References that are given up together.
struct Owned {
    PyObject* all[12];
    int count = 0;
    PyObject* operator()(PyObject* object) { return all[count++] = object; }
    ~Owned() {
        while (count && !without_gil) Py_XDECREF(all[--count]);
    }
};

PyObject* field(PyObject* tuple, Py_ssize_t i) { return PyTuple_GetItem(tuple, i); }
bool has_any(const uint8_t* v, Index count) {
    uint8_t any = 0;
    for (Index i = 0; i < count; i++) any |= v[i];
    return any;
}
bool has_any(const double* v, Index count) {
    bool any = false;
    for (Index i = 0; i < count; i++) any |= v[i] != 0;
    return any;
}
bool is_tuple(PyObject* object, Py_ssize_t fields) { return PyTuple_Check(object) && PyTuple_Size(object) == fields; }
bool is_word(PyObject* object, const char* word) {
    return PyUnicode_CheckExact(object) && PyUnicode_CompareWithASCIIString(object, word) == 0;
}
bool are_none(PyObject* tuple, std::initializer_list<int> fields) {
    for (int i : fields)
        if (is_given(field(tuple, i))) return false;
    return true;
}

// Makes a named tuple of the values, whose reference it takes.
PyObject* as_named(int type, PyObject* values) {
    static const newfunc make = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
    Owned own;
    PyObject* arguments = own(values) ? own(PyTuple_Pack(1, values)) : nullptr;
    return arguments ? make((PyTypeObject*)given_once[type], arguments, nullptr) : nullptr;
}

// An array with elements that is NumPy's own, C-contiguous, of floats in this machine's byte order.
bool is_plain(PyObject* object, Type& type) {
    if (!PyArray_CheckExact(object)) return false;
    PyArrayObject* a = (PyArrayObject*)object;
    if (!PyArray_IS_C_CONTIGUOUS(a) || PyArray_ISBYTESWAPPED(a) || !PyArray_NDIM(a) || !PyArray_SIZE(a)) return false;
    bool known = type_of(a, type);
    if (!known) PyErr_Clear();
    return known && type != PARTIAL;
}

bool is_plain_vector(PyObject* object, Index n, const char*& data, Type& type) {
    if (!is_given(object)) return true;
    PyArrayObject* a = (PyArrayObject*)object;
    if (!is_plain(object, type) || PyArray_NDIM(a) != 1 || PyArray_DIM(a, 0) != n) return false;
    return data = PyArray_BYTES(a), true;
}

// Whether an array can take a result: of the shape and type of another, in memory that none of `others` has.
bool is_room(PyObject* object, PyArrayObject* like, std::initializer_list<PyObject*> others) {
    Type type;
    if (!is_plain(object, type) || !PyArray_ISWRITEABLE((PyArrayObject*)object)) return false;
    PyArrayObject* a = (PyArrayObject*)object;
    size_t dims = (size_t)PyArray_NDIM(a) * sizeof(npy_intp);
    bool same = PyArray_TYPE(a) == PyArray_TYPE(like) && PyArray_NDIM(a) == PyArray_NDIM(like);
    if (!same || memcmp(PyArray_DIMS(a), PyArray_DIMS(like), dims)) return false;
    for (PyObject* each : others) {
        PyArrayObject* other = (PyArrayObject*)each;
        if (is_given(each) && PyArray_BYTES(a) < PyArray_BYTES(other) + PyArray_NBYTES(other) &&
            PyArray_BYTES(other) < PyArray_BYTES(a) + PyArray_NBYTES(a)) return false;
    }
    return true;
}

Index last_length(PyArrayObject* a) { return PyArray_DIM(a, PyArray_NDIM(a) - 1); }

Array rows_of(PyArrayObject* a, Type type) {
    Array rows;
    Index n = last_length(a);
    rows.data = PyArray_BYTES(a), rows.type = type, rows.whole = true, rows.lead = rows.axes = 1;
    rows.count = rows.lengths[0] = PyArray_SIZE(a) / n, rows.strides[0] = n * BYTES[type];
    rows.lengths[1] = n, rows.strides[1] = BYTES[type];
    return rows;
}

bool has_float64(const Call& c) { return (c.gamma && c.gamma_type == F64) || (c.beta && c.beta_type == F64); }

// A new vector of a number for each row.
template <class T> PyObject* new_vector(npy_intp count, int type, T*& data) {
    PyObject* made = PyArray_SimpleNew(1, &count, type);
    if (made) data = (T*)PyArray_DATA((PyArrayObject*)made);
    return made;
}

// What the norm is, of which all but gamma, beta, eps and kind has to be as by default.
bool see_norm(PyObject* of, Call& c) {
    if (!is_tuple(of, norm::FIELDS)) return false;
    PyObject *eps = field(of, norm::EPS), *offset = field(of, norm::OFFSET);
    if (!PyFloat_CheckExact(eps) || !PyFloat_CheckExact(offset) || PyFloat_AsDouble(offset) != 0) return false;
    c.eps = PyFloat_AsDouble(eps), c.rms = is_word(field(of, norm::KIND), "rms");
    c.nearest = is_word(field(of, norm::ROUNDING), "nearest");
    return (c.nearest || is_word(field(of, norm::ROUNDING), "fast")) && c.eps >= 0 && c.eps <= __DBL_MAX__ &&
           is_plain_vector(field(of, norm::GAMMA), c.n, c.gamma, c.gamma_type) &&
           is_plain_vector(field(of, norm::BETA), c.n, c.beta, c.beta_type);
}

// Whether all is done; if not, and without an exception, nothing is.
bool run(Call& c) {
    Index elements = c.rows * c.n;
    int threads = 1;
    if (elements >= WORTH_SHARING) {
        Owned own;
        PyObject* found = own(PyObject_CallNoArgs(given_once[GET_NUM_THREADS]));
        threads = found ? (int)PyLong_AsLong(found) : 1;
        if (PyErr_Occurred()) return false;
    }
    jobs::plan(c);
    PyThreadState* state = elements >= WORTH_RELEASING ? PyEval_SaveThread() : nullptr;
    without_gil = state;
    jobs::State found = jobs::run(c, {}, threads);
    if (state) PyEval_RestoreThread(state);
    without_gil = false;
    if (found == jobs::NO_MEMORY) PyErr_NoMemory();
    return found == jobs::DONE && !(c.marks && has_any(c.marks, c.rows)) && !(c.undecided[0] && has_any(c.undecided[0], 2 * c.n));
}

// What a call that is not done returns: None if it is declined.
PyObject* undone() { return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None); }

// The vectors of the statistics, in the order of stats, of which a call has all or those of float64.
struct Words {
    double** places[stats::FIELDS] = {};
    explicit Words(Call& c) {
        if (!c.rms) places[stats::MEAN] = &c.mean, places[stats::MEAN_LO] = &c.rest;
        places[stats::RSTD] = &c.rstd;
        if (c.wide) places[stats::RSTD_LO] = &c.rstd_low;
        if (c.wide && !c.rms) places[stats::MEAN_TAIL] = &c.tail;
        if (c.nearest) places[stats::SPREAD] = &c.spread;
    }
};

// y, and the cache if it is wanted, of x, a norm and the options of a forward.
PyObject* plain_forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
    PyObject* declined = Py_None;
    Call c;
    Type type;
    if (count != 3 || !jobs::kernels || !is_plain(args[0], type) || !is_tuple(args[2], ahead::FIELDS)) return Py_NewRef(declined);
    PyObject *options = args[2], *axis = field(options, ahead::AXIS);
    if (!PyLong_CheckExact(axis) || PyLong_AsLong(axis) != -1) return PyErr_Clear(), Py_NewRef(declined);
    if (!are_none(options, {ahead::RESIDUAL, ahead::WHERE, ahead::THREADS})) return Py_NewRef(declined);
    PyArrayObject* x = (PyArrayObject*)args[0];
    c.n = last_length(x);
    if (!see_norm(args[1], c)) return Py_NewRef(declined);
    bool keep = field(options, ahead::KEEP) != Py_False;
    c.x = rows_of(x, type), c.rows = c.x.count, c.wide = type == F64 || has_float64(c);

    PyObject *out = field(options, ahead::OUT), *gamma = field(args[1], norm::GAMMA), *beta = field(args[1], norm::BETA);
    if (is_given(out) && !is_room(out, x, {args[0], gamma, beta})) return Py_NewRef(declined);

    Owned own;
    PyObject* y = own(is_given(out) ? Py_NewRef(out) : new_array(PyArray_DESCR(x), PyArray_NDIM(x), PyArray_DIMS(x)));
    PyObject* marks = c.pairs() ? own(new_vector(c.rows, NPY_UINT8, c.marks)) : y;
    if (!y || !marks) return nullptr;
    Words words(c);
    PyObject *none = Py_None, *kept = own(PyTuple_New(stats::FIELDS));
    for (int i = 0; kept && i < stats::FIELDS; i++) {
        double** place = keep || c.wide ? words.places[i] : nullptr;
        PyObject* word = place ? new_vector(c.rows, NPY_DOUBLE, *place) : Py_NewRef(none);
        if (!word || PyTuple_SetItem(kept, i, word) < 0) return nullptr;
    }
    c.y = rows_of((PyArrayObject*)y, type);
    if (!kept || !run(c)) return undone();
    if (!keep) return PyTuple_Pack(2, y, none);
    // Dropped where no row needs it, as in the reference.
    if (c.tail && !has_any(c.tail, c.rows)) PyTuple_SetItem(kept, stats::MEAN_TAIL, Py_NewRef(none));
    kept = own(as_named(STATISTICS, Py_NewRef(kept)));
    if (!kept) return nullptr;
    PyObject* values = Py_BuildValue("OO(i)OsO", args[0], args[1], PyArray_NDIM(x) - 1, kept, "native", none);
    PyObject* cache = own(as_named(CACHE, values));
    return cache ? PyTuple_Pack(2, y, cache) : nullptr;
}

// The statistics of a cache of a plain forward of this kind.
bool see_cache(PyObject* of, PyObject* kind, Call& c) {
    if (Py_TYPE(of) != (PyTypeObject*)given_once[CACHE] || !is_tuple(of, cache::FIELDS)) return false;
    PyObject *x = field(of, cache::X), *axes = field(of, cache::AXIS), *kept = field(of, cache::STATISTICS);
    Type type;
    if (!is_plain(x, type) || !is_tuple(axes, 1) || !is_tuple(kept, stats::FIELDS)) return false;
    PyArrayObject* a = (PyArrayObject*)x;
    c.n = last_length(a), c.x = rows_of(a, type), c.rows = c.x.count;
    bool same = is_word(field(of, cache::BACKEND), "native") && see_norm(field(of, cache::NORM), c);
    if (!same || !is_word(kind, c.rms ? "rms" : "layer") || PyLong_AsLong(field(axes, 0)) != PyArray_NDIM(a) - 1) return false;
    c.wide = is_given(field(kept, stats::RSTD_LO));
    if (!are_none(of, {cache::WHERE}) || !are_none(kept, {stats::EXPONENT, stats::EXTREME})) return false;
    // What a forward kept of which nothing was float64 is too little for double-double.
    if (!c.wide && (type == F64 || has_float64(c))) return false;
    Words words(c);
    for (int i = 0; i < stats::FIELDS; i++) {
        PyArrayObject* word = (PyArrayObject*)field(kept, i);
        if (!words.places[i] || (i == stats::MEAN_TAIL && !is_given((PyObject*)word))) continue;
        bool whole = PyArray_CheckExact((PyObject*)word) && PyArray_TYPE(word) == NPY_DOUBLE && PyArray_IS_C_CONTIGUOUS(word);
        if (!whole || PyArray_SIZE(word) != c.rows) return false;
        *words.places[i] = (double*)PyArray_DATA(word);
    }
    return true;
}

// All gradients of dy, a cache, the kind of a norm and the options of a backward.
PyObject* plain_backward(PyObject*, PyObject* const* args, Py_ssize_t count) {
    PyObject* declined = Py_None;
    Call c;
    Type type;
    if (count != 4 || !jobs::kernels || !is_plain(args[0], type) || !is_tuple(args[3], back::FIELDS)) return Py_NewRef(declined);
    PyObject* options = args[3];
    bool all = field(options, back::WRT) == given_once[ALL_NAMES] && field(options, back::ACCUMULATE) == Py_False;
    if (!all || !are_none(options, {back::DSUM, back::SUM_AXES, back::DMEAN, back::DRSTD, back::THREADS})) return Py_NewRef(declined);
    if (!see_cache(args[1], args[2], c)) return PyErr_Clear(), Py_NewRef(declined);
    PyArrayObject *dy = (PyArrayObject*)args[0], *x = (PyArrayObject*)field(args[1], cache::X);
    int ndim = PyArray_NDIM(x);
    bool alike = PyArray_NDIM(dy) == ndim && !memcmp(PyArray_DIMS(x), PyArray_DIMS(dy), (size_t)ndim * sizeof(npy_intp));
    if (!alike || c.x.type != type) return Py_NewRef(declined);

    Owned own;
    PyObject *out = field(options, back::OUT), *of = field(args[1], cache::NORM), *results[] = {Py_None, Py_None, Py_None};
    PyObject* likes[] = {(PyObject*)x, field(of, norm::GAMMA), field(of, norm::BETA)};
    if (is_given(out) && !is_tuple(out, 3)) return Py_NewRef(declined);
    for (int i = 0; i < 3; i++) {
        PyObject* given = is_given(out) ? field(out, i) : Py_None;
        PyArrayObject* like = (PyArrayObject*)likes[i];
        if (is_given(given) && !(is_given(likes[i]) && is_room(given, like, {args[0], likes[0], likes[1], results[0], results[1]})))
            return Py_NewRef(declined);
        if (!is_given(likes[i])) continue;
        results[i] = own(is_given(given) ? Py_NewRef(given) : new_array(PyArray_DESCR(like), PyArray_NDIM(like), PyArray_DIMS(like)));
        if (!results[i]) return nullptr;
    }
    PyObject* marks = c.pairs() ? own(new_vector(c.rows, NPY_UINT8, c.marks)) : results[0];
    PyObject* open = c.nearest ? own(new_vector(2 * c.n, NPY_UINT8, c.undecided[0])) : results[0];
    if (!marks || !open) return nullptr;
    if (c.nearest) memset(c.undecided[0], 0, (size_t)(2 * c.n)), c.undecided[1] = c.undecided[0] + c.n;
    // Rows that are extreme by what the forward found; tiny ones, of a forward that was all the reference's.
    for (Index i = 0; c.pairs() && i < c.rows; i++)
        c.marks[i] = !(c.rstd[i] <= LARGEST) || (c.mean && !(__builtin_fabs(c.mean[i]) < __builtin_inf())) ||
                     (c.spread && c.spread[i] > 0 && c.spread[i] < SMALLEST);
    if (c.pairs() && has_any(c.marks, c.rows)) return Py_NewRef(declined);
    c.backward = true, c.dy = rows_of(dy, type), c.y = rows_of((PyArrayObject*)results[0], type);
    for (int i = 0; i < 2; i++) {
        if (!is_given(results[1 + i])) continue;
        c.sums_out[i] = PyArray_BYTES((PyArrayObject*)results[1 + i]), c.sums_type[i] = i ? c.beta_type : c.gamma_type;
    }
    return run(c) ? as_named(GRADIENTS, PyTuple_Pack(3, results[0], results[1], results[2])) : undone();
}

}  // namespace
