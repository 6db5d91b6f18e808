/* What a call is given and the state that it finds, looked at in one call each: whether tensors are what TensorGuards last found
   (same_tensors.py), arguments what they were (arguments.py), and answers of torch the same (_torch.py). */
#include <Python.h>

/* Where torch says in memory what a tensor is: see TensorLayout of _torch.py. */
typedef struct {
    Py_ssize_t object, first, last, meta, storage, history, gradient;
} Layout;

#define WORD(address, i) (((const uint64_t *)(address))[i])
#define IMPLEMENTATION(tensor, at) ((const void *)WORD(tensor, (at).object))

static int as_layout(PyObject *numbers, Layout *at)
{
    return PyArg_ParseTuple(numbers, "nnnnnnn", &at->object, &at->first, &at->last, &at->meta, &at->storage, &at->history, &at->gradient);
}

/* Where its memory is: none of a tensor without a storage. */
static uint64_t address_of(const void *implementation, const Layout *at)
{
    uint64_t storage = WORD(implementation, at->first);
    return storage == 0 ? 0 : WORD(storage, at->storage);
}

/* Tensors, and the words of memory as they were. */
typedef struct {
    PyObject_HEAD
    PyObject *kept; /* a tuple of the tensors */
    Layout at;
    Py_ssize_t n, n_words;
    PyTypeObject **kinds;
    uint64_t *seen;
} Tensors;

static PyObject *tensors_hold(Tensors *self, PyObject *Py_UNUSED(ignored))
{
    const Layout at = self->at;
    const uint64_t *seen = self->seen;
    size_t length = (at.last - at.first) * sizeof *seen;
    for (Py_ssize_t i = 0; i < self->n; i++, seen += self->n_words) {
        PyObject *tensor = PyTuple_GET_ITEM(self->kept, i);
        if (i + 8 < self->n) { /* kernels have used the processor's caches since */
            const char *ahead = IMPLEMENTATION(PyTuple_GET_ITEM(self->kept, i + 4), at);
            __builtin_prefetch(PyTuple_GET_ITEM(self->kept, i + 8));
            __builtin_prefetch(ahead + 64);
            __builtin_prefetch(ahead + 128);
        }
        const void *now = IMPLEMENTATION(tensor, at), *meta = (const void *)WORD(now, at.meta);
        if (Py_TYPE(tensor) != self->kinds[i] || memcmp((const uint64_t *)now + at.first, seen, length) != 0) Py_RETURN_FALSE;
        if (address_of(now, &at) != seen[self->n_words - 3]) Py_RETURN_FALSE;
        if (meta != NULL && (WORD(meta, at.history) != seen[self->n_words - 2] || WORD(meta, at.gradient) != seen[self->n_words - 1])) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* Tensors(tuple of tensors, layout): as they are now. */
static PyObject *make_tensors(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *tensors, *layout;
    Layout at;
    if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &tensors, &PyTuple_Type, &layout) || !as_layout(layout, &at)) return NULL;
    Tensors *self = (Tensors *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->kept = Py_NewRef(tensors);
    self->at = at;
    self->n = PyTuple_GET_SIZE(tensors);
    self->n_words = at.last - at.first + 3;
    self->kinds = PyMem_New(PyTypeObject *, self->n + 1);
    self->seen = PyMem_New(uint64_t, self->n * self->n_words + 1);
    if (!self->kinds || !self->seen) { Py_DECREF(self); return PyErr_NoMemory(); }
    for (Py_ssize_t i = 0; i < self->n; i++) {
        uint64_t *seen = self->seen + i * self->n_words;
        const void *now = IMPLEMENTATION(PyTuple_GET_ITEM(tensors, i), at), *meta = (const void *)WORD(now, at.meta);
        self->kinds[i] = Py_TYPE(PyTuple_GET_ITEM(tensors, i));
        memcpy(seen, (const uint64_t *)now + at.first, (at.last - at.first) * sizeof *seen);
        seen[self->n_words - 3] = address_of(now, &at);
        seen[self->n_words - 2] = meta == NULL ? 0 : WORD(meta, at.history);
        seen[self->n_words - 1] = meta == NULL ? 0 : WORD(meta, at.gradient);
    }
    return (PyObject *)self;
}

static void end_tensors(Tensors *self)
{
    PyObject_GC_UnTrack(self);
    PyMem_Free(self->kinds);
    PyMem_Free(self->seen);
    Py_CLEAR(self->kept);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int traverse_tensors(Tensors *self, visitproc visit, void *arg)
{
    Py_VISIT(self->kept);
    return 0;
}

static PyMethodDef methods_of_tensors[] = {{"holds", (PyCFunction)tensors_hold, METH_NOARGS, "Whether each is what it was."}, {0}};
PyTypeObject fxpasses_tensors = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fxpasses_watch.Tensors",
    .tp_basicsize = sizeof(Tensors),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = make_tensors,
    .tp_dealloc = (destructor)end_tensors,
    .tp_traverse = (traverseproc)traverse_tensors,
    .tp_methods = methods_of_tensors,
};

#define NUMBER 2

/* Arguments of a call that are certain to be described as others were. */
typedef struct {
    PyObject_HEAD
    PyObject *names, *values; /* of keywords; all values, those by name last: what is no tensor has to be the same object */
    PyObject **places; /* of all, not kept: who made this lets go of it when an object is gone */
    PyObject *owner; /* keeps the places of tensors of the model */
    Layout at;
    Py_ssize_t n_positional, n_tensors, n_model, words;
    unsigned char *is_tensor;
    PyTypeObject **kinds;
    PyObject **model; /* sorted */
    uint64_t *seen, *memory; /* of the last call */
} Arguments;

static int by_place(const void *a, const void *b)
{
    uintptr_t left = (uintptr_t) * (PyObject *const *)a, right = (uintptr_t) * (PyObject *const *)b;
    return (left > right) - (left < right);
}

/* What differs in each tensor: its memory, what autograd knows, its count of changes, its object. */
static int own_word(const Layout *at, Py_ssize_t word) { return word <= at->meta || word == at->meta + 2 || word == at->meta + 3; }

static int is_plain(const void *now, const Layout *at)
{
    const void *meta = (const void *)WORD(now, at->meta);
    return meta == NULL || (WORD(meta, at->history) == 0 && (WORD(meta, at->gradient) & 0xFF) == 0);
}

static int is_same_tensor(Arguments *self, PyObject *tensor, Py_ssize_t position)
{
    const Layout at = self->at;
    if (Py_TYPE(tensor) != self->kinds[position]) return 0;
    const uint64_t *seen = self->seen + position * self->words;
    const void *now = IMPLEMENTATION(tensor, at);
    for (Py_ssize_t i = 0; i < self->words; i++)
        if (!own_word(&at, at.first + i) && WORD(now, at.first + i) != seen[i]) return 0;
    PyObject **attributes = _PyObject_GetDictPtr(tensor);
    if (!is_plain(now, &at) || (attributes != NULL && *attributes != NULL && PyDict_GET_SIZE(*attributes) != 0)) return 0;
    return bsearch(&tensor, self->model, self->n_model, sizeof tensor, by_place) == NULL;
}

static int by_number(const void *a, const void *b)
{
    uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
    return (left > right) - (left < right);
}

/* The tensors among (args, kwargs), in a list, or None where it is not certain that all is as it was. */
static PyObject *tensors_of(Arguments *self, PyObject *const *given, Py_ssize_t n)
{
    if (n != 2 || !PyTuple_Check(given[0]) || !PyDict_Check(given[1])) return PyErr_Format(PyExc_TypeError, "a tuple and a dictionary");
    PyObject *key, *value, *found;
    Py_ssize_t count = PyTuple_GET_SIZE(self->values), place = 0, tensors = 0;
    if (PyTuple_GET_SIZE(given[0]) != self->n_positional || PyDict_GET_SIZE(given[1]) != PyTuple_GET_SIZE(self->names)) Py_RETURN_NONE;
    if ((found = PyList_New(self->n_tensors)) == NULL) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i < self->n_positional) value = PyTuple_GET_ITEM(given[0], i);
        else if (!PyDict_Next(given[1], &place, &key, &value) || key != PyTuple_GET_ITEM(self->names, i - self->n_positional)) goto unsure;
        if (self->is_tensor[i] == NUMBER) {
            if (Py_TYPE(value) != self->kinds[i]) goto unsure;
            continue;
        }
        if (!self->is_tensor[i]) {
            if (value != self->places[i]) goto unsure;
            continue;
        }
        if (!is_same_tensor(self, value, i)) goto unsure;
        self->memory[tensors] = address_of(IMPLEMENTATION(value, self->at), &self->at);
        PyList_SET_ITEM(found, tensors++, Py_NewRef(value));
    }
    qsort(self->memory, tensors, sizeof *self->memory, by_number);
    for (Py_ssize_t i = 1; i < tensors; i++)
        if (self->memory[i] == self->memory[i - 1]) goto unsure;
    return found;
unsure:
    Py_DECREF(found);
    Py_RETURN_NONE;
}

/* Arguments(args, kwargs, kinds of all ("tensor", "object", which is not kept, "number", which may be any of its type, or ""), tensors of the model, layout): see SameArguments, which has
   asked all that is not asked here. */
static PyObject *make_arguments(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *positional, *named, *kinds, *model, *layout;
    Layout at;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!", &PyTuple_Type, &positional, &PyDict_Type, &named, &PyTuple_Type, &kinds, &PyTuple_Type, &model,
                          &PyTuple_Type, &layout) || !as_layout(layout, &at))
        return NULL;
    Arguments *self = (Arguments *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(positional) + PyDict_GET_SIZE(named), place = 0;
    PyObject *keys = PyDict_Keys(named), *key;
    self->names = keys == NULL ? NULL : PyList_AsTuple(keys);
    self->values = PyTuple_New(count);
    Py_XDECREF(keys);
    if (self->names == NULL || self->values == NULL) { Py_DECREF(self); return NULL; }
    if (count != PyTuple_GET_SIZE(kinds)) { Py_DECREF(self); return PyErr_Format(PyExc_ValueError, "not a kind for each argument"); }
    self->owner = Py_NewRef(model);
    self->at = at;
    self->n_positional = PyTuple_GET_SIZE(positional);
    self->n_model = PyTuple_GET_SIZE(model);
    self->words = at.last - at.first;
    self->is_tensor = PyMem_New(unsigned char, count + 1);
    self->kinds = PyMem_New(PyTypeObject *, count + 1);
    self->places = PyMem_New(PyObject *, count + 1);
    self->seen = PyMem_New(uint64_t, count * self->words + 1);
    self->model = PyMem_New(PyObject *, self->n_model + 1);
    self->memory = PyMem_New(uint64_t, count + 1);
    if (!self->memory || !self->is_tensor || !self->kinds || !self->places || !self->seen || !self->model) { Py_DECREF(self); return PyErr_NoMemory(); }
    for (Py_ssize_t i = 0; i < self->n_model; i++) self->model[i] = PyTuple_GET_ITEM(model, i);
    qsort(self->model, self->n_model, sizeof *self->model, by_place);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *value;
        if (i < self->n_positional) value = PyTuple_GET_ITEM(positional, i);
        else PyDict_Next(named, &place, &key, &value);
        const char *kind = PyUnicode_AsUTF8(PyTuple_GET_ITEM(kinds, i));
        if (kind == NULL) { Py_DECREF(self); return NULL; }
        self->is_tensor[i] = kind[0] == 't' ? 1 : kind[0] == 'n' ? NUMBER : 0;
        self->kinds[i] = Py_TYPE(value);
        self->places[i] = value;
        PyTuple_SET_ITEM(self->values, i, Py_NewRef(kind[0] ? Py_None : value)); /* no tensor is kept alive */
        if (self->is_tensor[i] != 1) continue;
        memcpy(self->seen + i * self->words, (const uint64_t *)IMPLEMENTATION(value, at) + at.first, self->words * sizeof *self->seen);
        self->n_tensors++;
    }
    return (PyObject *)self;
}

static void end_arguments(Arguments *self)
{
    void *made[] = {self->is_tensor, self->kinds, self->places, self->model, self->seen, self->memory};
    PyObject_GC_UnTrack(self);
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) PyMem_Free(made[i]);
    Py_CLEAR(self->names); Py_CLEAR(self->values); Py_CLEAR(self->owner);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int traverse_arguments(Arguments *self, visitproc visit, void *arg)
{
    Py_VISIT(self->names); Py_VISIT(self->values); Py_VISIT(self->owner);
    return 0;
}

static PyMethodDef methods_of_arguments[] = {
    {"tensors", (PyCFunction)(void (*)(void))tensors_of, METH_FASTCALL, "The tensors among (args, kwargs), or None where it is not certain."}, {0}};
PyTypeObject fxpasses_arguments = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fxpasses_watch.Arguments",
    .tp_basicsize = sizeof(Arguments),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = make_arguments,
    .tp_dealloc = (destructor)end_arguments,
    .tp_traverse = (traverseproc)traverse_arguments,
    .tp_methods = methods_of_arguments,
};

/* unchanged(questions, answers): whether each question, a callable and its arguments in a tuple, is still answered so. */
PyObject *fxpasses_unchanged(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t n)
{
    if (n != 2 || !PyTuple_Check(given[0]) || !PyTuple_Check(given[1]) || PyTuple_GET_SIZE(given[0]) != PyTuple_GET_SIZE(given[1]))
        return PyErr_Format(PyExc_TypeError, "two tuples of the same length");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given[0]); i++) {
        PyObject *question = PyTuple_GET_ITEM(given[0], i);
        if (!PyTuple_Check(question) || PyTuple_GET_SIZE(question) < 1) return PyErr_Format(PyExc_TypeError, "a tuple for each question");
        PyObject **parts = ((PyTupleObject *)question)->ob_item;
        PyObject *answer = PyObject_Vectorcall(parts[0], parts + 1, PyTuple_GET_SIZE(question) - 1, NULL);
        int same = answer == NULL ? -1 : PyObject_RichCompareBool(answer, PyTuple_GET_ITEM(given[1], i), Py_EQ);
        Py_XDECREF(answer);
        if (same < 0) return NULL;
        if (!same) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}
