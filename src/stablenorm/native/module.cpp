// What Python calls. Everything about the arguments is checked above, but for what memory safety needs: that
// arrays are arrays, and how they lie.
#include "plain.h"

namespace {

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
    if (!check_count(count, 25)) return nullptr;
    Arguments given{args};
    Call c;
    jobs::Samples s;
    c.backward = true;
    s.count = PyLong_AsSsize_t(args[24]);
    auto apart = [&](Index& of) { return s.count ? &of : nullptr; };
    if (!see(given.take(), c.x, apart(s.x)) || !see(given.take(), c.y, apart(s.y))) return nullptr;
    if (!see(given.take(), c.dy, apart(s.dy)) || !see(given.take(), c.plus, apart(s.plus))) return nullptr;
    if (!vector_of(given.take(), c.gamma, &c.gamma_type, apart(s.gamma))) return nullptr;
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

// Statistics, Cache, Gradients, the default of `wrt`, get_num_threads, and what names the default limit.
PyObject* prepare(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != GIVEN + 1) return fail(PyExc_TypeError, "six objects are needed%S", PyTuple_New(0)), nullptr;
    for (int i = 0; i < GIVEN; i++) given_once[i] = Py_NewRef(args[i]);
    default_limit = Py_NewRef(args[GIVEN]);
    return Py_NewRef(Py_None);
}

PyObject* empty(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 2 || !PyTuple_Check(args[0]) || PyTuple_Size(args[0]) > 64) return fail(PyExc_TypeError, "a shape and a dtype are needed, got %R", Py_None), nullptr;
    npy_intp shape[64];
    int ndim = (int)PyTuple_Size(args[0]);
    for (int k = 0; k < ndim && k < 64; k++) shape[k] = PyLong_AsSsize_t(PyTuple_GetItem(args[0], k));
    return PyErr_Occurred() ? nullptr : new_array((PyArray_Descr*)args[1], ndim, shape);
}

PyObject* idle_bytes(PyObject*, PyObject*) { return PyLong_FromSize_t(memory::idle_bytes()); }
PyObject* set_idle_limit(PyObject*, PyObject* value) { return set_limit(value) ? Py_NewRef(Py_None) : nullptr; }

template <class F> PyCFunction as_method(F f) { return (PyCFunction)(void (*)())f; }

PyMethodDef methods[] = {
    {"forward", as_method(forward), METH_FASTCALL, "Normalize rows; False if the call is not for these kernels."},
    {"backward", as_method(backward), METH_FASTCALL, "Pull back rows; False if the call is not for these kernels."},
    {"prepare", as_method(prepare), METH_FASTCALL, "Take what the calls need of Python, once."},
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
