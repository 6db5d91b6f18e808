/* What a plan's check has seen, looked at again in one call: the same questions as Watch.holds asks in Python (watched_state.py).
   Versions stand for content: a class gets a new one with every change of it or of a base, up to Python 3.11 a dictionary with each of
   its own. Later Pythons tell of changes of dictionaries instead. */
#include <Python.h>
#include <structmember.h>

#if PY_VERSION_HEX >= 0x030E0000 || defined(Py_GIL_DISABLED)
#error "not tried with this Python"
#endif
extern PyTypeObject fxpasses_tensors, fxpasses_arguments; /* of calls.c */
extern PyObject *fxpasses_unchanged(PyObject *, PyObject *const *, Py_ssize_t);
#define AHEAD 16 /* what is looked at next is fetched: kernels have used the processor's caches since the last call */
#define IS_TOLD (PY_VERSION_HEX >= 0x030C0000)

typedef struct {
    PyObject_HEAD
    PyObject *kept; /* a tuple of the lists below, which keeps all that they point to */
    Py_ssize_t n_dicts, n_lists, n_classes, n_objects, n_attributes, n_entries;
    PyObject **dicts, **lists, **items, **objects, **owners, **names, **values, **modules, **keys, **entries;
#if IS_TOLD
    uint64_t seen; /* how many changes of dictionaries have been looked at */
    Py_ssize_t n_split;
    PyObject **split, **parts; /* dictionaries of whose changes it does not tell, and their keys and values */
    PyObject **mros; /* of classes without a version, whose own dictionaries are looked at; else NULL */
#else
    uint64_t *versions, *module_versions;
#endif
    PyObject ***fields, **contents; /* where an attribute is in memory, if that is known, and what is there */
    PyTypeObject **classes, **kinds;
    unsigned int *tags;
} Watched;

static PyObject *gone; /* stands for what is not there */

#if IS_TOLD
#define KEPT 4096
static PyObject *changed[KEPT]; /* the dictionaries that have changed last, of all that any check has seen: compared, never read */
static uint64_t changes;
static int watcher = -1;

static int note_change(PyDict_WatchEvent event, PyObject *dict, PyObject *key, PyObject *value)
{
    changed[changes++ % KEPT] = dict;
    return 0;
}

static int by_address(const void *a, const void *b)
{
    uintptr_t left = (uintptr_t) * (PyObject *const *)a, right = (uintptr_t) * (PyObject *const *)b;
    return (left > right) - (left < right);
}

static int same_content(PyObject *dict, PyObject *was)
{
    Py_ssize_t n = PyList_GET_SIZE(was) / 2, place = 0, i = 0;
    PyObject *key, *value;
    if (PyDict_GET_SIZE(dict) != n) return 0;
    for (; PyDict_Next(dict, &place, &key, &value); i++)
        if (i >= n || key != PyList_GET_ITEM(was, i) || value != PyList_GET_ITEM(was, n + i)) return 0;
    return 1;
}

/* Whether no dictionary has changed; -1 where too many have, of other checks too, to tell. */
static int same_dicts(Watched *self)
{
    for (Py_ssize_t i = 0; i < self->n_split; i++)
        if (!same_content(self->split[i], self->parts[i])) return 0;
    if (changes - self->seen > KEPT) return -1;
    for (; self->seen < changes; self->seen++)
        if (bsearch(&changed[self->seen % KEPT], self->dicts, self->n_dicts, sizeof *self->dicts, by_address)) return 0;
    return 1;
}

/* From Python 3.13 on, a class that was changed a thousand times gets no more versions: torch.Tensor, in a process that compiles much. */
static int watch_unversioned(Watched *self)
{
    PyObject *any = PyUnicode_InternFromString("__init__");
    PyObject **more = PyMem_Resize(self->dicts, PyObject *, self->n_dicts + self->n_classes + 1);
    if (more != NULL) self->dicts = more;
    self->mros = PyMem_New(PyObject *, self->n_classes + 1);
    for (Py_ssize_t i = 0; self->mros != NULL && i < self->n_classes; i++) self->mros[i] = NULL;
    int made = any != NULL && more != NULL && self->mros != NULL;
    if (any != NULL && !made) PyErr_NoMemory();
    for (Py_ssize_t i = 0; made && i < self->n_classes; i++) {
        _PyType_Lookup(self->classes[i], any); /* gives the class a version, if it has none */
        if (self->classes[i]->tp_version_tag != 0) continue;
        PyObject *own = PyType_GetDict(self->classes[i]);
        made = own != NULL && PyDict_Watch(watcher, own) == 0;
        self->mros[i] = Py_XNewRef(self->classes[i]->tp_mro);
        if (made) self->dicts[self->n_dicts++] = own; /* the class has it */
        Py_XDECREF(own);
    }
    Py_XDECREF(any);
    return made;
}

static int watch_dicts(Watched *self, PyObject *contents)
{
    if (watcher < 0 && (watcher = PyDict_AddWatcher(note_change)) < 0) return 0;
    self->split = PyMem_New(PyObject *, self->n_dicts + 1);
    self->parts = PyMem_New(PyObject *, self->n_dicts + 1);
    if (!self->split || !self->parts) return PyErr_NoMemory() != NULL;
    for (Py_ssize_t i = 0; i < self->n_dicts; i++) {
        if (PyDict_Watch(watcher, self->dicts[i]) < 0) return 0;
#if PY_VERSION_HEX >= 0x030D0000
        if (((PyDictObject *)self->dicts[i])->ma_values == NULL) continue; /* else it may only stand for what is in its object */
        self->split[self->n_split] = self->dicts[i];
        self->parts[self->n_split++] = PyList_GET_ITEM(contents, i);
#endif
    }
    if (!watch_unversioned(self)) return 0;
    qsort(self->dicts, self->n_dicts, sizeof *self->dicts, by_address);
    self->seen = changes;
    return 1;
}
#else
#define VERSION(dict) (((PyDictObject *)(dict))->ma_version_tag)

static int same_dicts(Watched *self)
{
    for (Py_ssize_t i = 0; i < self->n_dicts; i++) {
        if (i + AHEAD < self->n_dicts) __builtin_prefetch(&VERSION(self->dicts[i + AHEAD]));
        if (VERSION(self->dicts[i]) != self->versions[i]) return 0;
    }
    return 1;
}
#endif

static int same_elements(PyObject *set, PyObject *was)
{
    Py_ssize_t n = PyList_GET_SIZE(was), i = 0;
    if (PySet_GET_SIZE(set) != n || n == 0) return n == PySet_GET_SIZE(set);
    PyObject *elements = PyObject_GetIter(set), *item;
    if (elements == NULL) return -1;
    for (; i < n && (item = PyIter_Next(elements)) != NULL; i++) {
        Py_DECREF(item); /* the set has it */
        if (item != PyList_GET_ITEM(was, i)) break;
    }
    Py_DECREF(elements);
    return PyErr_Occurred() ? -1 : i == n;
}

static int same_keys(PyObject *dict, PyObject *was)
{
    Py_ssize_t n = PyList_GET_SIZE(was), place = 0, i = 0;
    PyObject *key;
    if (PyDict_GET_SIZE(dict) != n) return 0;
    for (; PyDict_Next(dict, &place, &key, NULL); i++)
        if (i >= n || key != PyList_GET_ITEM(was, i)) return 0;
    return 1;
}

static int same_items(PyObject *list, PyObject *was)
{
    Py_ssize_t n = PyList_GET_SIZE(was);
    if (PyAnySet_Check(list)) return same_elements(list, was);
    if (PyDict_Check(list)) return same_keys(list, was);
    if (PyList_GET_SIZE(list) != n) return 0;
    for (Py_ssize_t i = 0; i < n; i++)
        if (PyList_GET_ITEM(list, i) != PyList_GET_ITEM(was, i)) return 0;
    return 1;
}

static int same_attribute(PyObject *owner, PyObject *name, PyObject *was)
{
    PyObject *value = PyObject_GetAttr(owner, name);
    if (value == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError) && !PyErr_ExceptionMatches(PyExc_ValueError)) return -1;
        PyErr_Clear();
        return was == gone;
    }
    int same = value == was;
    Py_DECREF(value);
    return same;
}

/* The place of what `__slots__` names. */
static PyObject **slot_of(PyObject *owner, PyObject *name)
{
    PyObject *found = _PyType_Lookup(Py_TYPE(owner), name);
    if (found == NULL || !Py_IS_TYPE(found, &PyMemberDescr_Type)) return NULL;
    PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
    return member->type == T_OBJECT_EX ? (PyObject **)((char *)owner + member->offset) : NULL;
}

/* The place of an attribute in its object, or NULL where it has to be asked for. */
static PyObject **field_of(PyObject *owner, PyObject *name)
{
    if (PyUnicode_CompareWithASCIIString(name, "__dict__") == 0) return _PyObject_GetDictPtr(owner);
    if (PyCell_Check(owner)) return &((PyCellObject *)owner)->ob_ref;
    if (PyType_Check(owner) && PyType_HasFeature((PyTypeObject *)owner, Py_TPFLAGS_HEAPTYPE)) {
        if (PyUnicode_CompareWithASCIIString(name, "__name__") == 0) return &((PyHeapTypeObject *)owner)->ht_name;
        if (PyUnicode_CompareWithASCIIString(name, "__qualname__") == 0) return &((PyHeapTypeObject *)owner)->ht_qualname;
    }
    if (!PyFunction_Check(owner)) return slot_of(owner, name);
    PyFunctionObject *function = (PyFunctionObject *)owner;
    if (PyUnicode_CompareWithASCIIString(name, "__code__") == 0) return &function->func_code;
    if (PyUnicode_CompareWithASCIIString(name, "__defaults__") == 0) return &function->func_defaults;
    if (PyUnicode_CompareWithASCIIString(name, "__name__") == 0) return &function->func_name;
    if (PyUnicode_CompareWithASCIIString(name, "__qualname__") == 0) return &function->func_qualname;
    if (PyUnicode_CompareWithASCIIString(name, "__kwdefaults__") == 0) return &function->func_kwdefaults;
    return NULL;
}

static int same_entry(PyObject *dict, PyObject *key, PyObject *was)
{
    PyObject *value = PyDict_GetItemWithError(dict, key);
    if (value == NULL && PyErr_Occurred()) return -1;
    return (value == NULL ? gone : value) == was;
}

static PyObject *holds(Watched *self, PyObject *Py_UNUSED(ignored))
{
    int same = same_dicts(self);
    if (same < 0) Py_RETURN_NONE;
    if (!same) Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < self->n_objects; i++) {
        if (i + AHEAD < self->n_objects) __builtin_prefetch(&self->objects[i + AHEAD]->ob_type);
        if (Py_TYPE(self->objects[i]) != self->kinds[i]) Py_RETURN_FALSE;
    }
    for (Py_ssize_t i = 0; i < self->n_classes; i++) {
        if (self->classes[i]->tp_version_tag != self->tags[i]) Py_RETURN_FALSE;
#if IS_TOLD
        if (self->mros[i] != NULL && self->classes[i]->tp_mro != self->mros[i]) Py_RETURN_FALSE;
#endif
    }
    for (Py_ssize_t i = 0; i < self->n_lists; i++) {
        same = same_items(self->lists[i], self->items[i]);
        if (same < 0) return NULL;
        if (!same) Py_RETURN_FALSE;
    }
    for (Py_ssize_t i = 0; i < self->n_entries; i++) {
#if !IS_TOLD
        uint64_t version = VERSION(self->modules[i]);
        if (version == self->module_versions[i]) continue;
#endif
        same = same_entry(self->modules[i], self->keys[i], self->entries[i]);
        if (same < 0) return NULL;
        if (!same) Py_RETURN_FALSE;
#if !IS_TOLD
        self->module_versions[i] = version;
#endif
    }
    for (Py_ssize_t i = 0; i < self->n_attributes; i++) {
        if (i + AHEAD < self->n_attributes) __builtin_prefetch(self->fields[i + AHEAD]);
        if (self->fields[i] != NULL) {
            if (*self->fields[i] != self->contents[i]) Py_RETURN_FALSE;
            continue;
        }
        same = same_attribute(self->owners[i], self->names[i], self->values[i]);
        if (same < 0) return NULL;
        if (!same) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyObject **pointers(PyObject *list)
{
    Py_ssize_t n = PyList_GET_SIZE(list);
    PyObject **made = PyMem_New(PyObject *, n ? n : 1);
    for (Py_ssize_t i = 0; made != NULL && i < n; i++) made[i] = PyList_GET_ITEM(list, i);
    return made;
}

static int all_of(PyObject *list, int (*is)(PyObject *))
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++)
        if (!is(PyList_GET_ITEM(list, i))) return 0;
    return 1;
}

static int is_dict(PyObject *value) { return PyDict_Check(value); }
static int is_state(PyObject *value) { return IS_TOLD ? PyList_Check(value) : PyLong_Check(value); }
static int is_list(PyObject *value) { return PyList_Check(value); }
static int is_list_set_or_dict(PyObject *value) { return PyList_Check(value) || PyAnySet_Check(value) || PyDict_Check(value); }
static int is_class(PyObject *value) { return PyType_Check(value); }
static int is_name(PyObject *value) { return PyUnicode_Check(value); }

/* Watched(dicts, versions, lists, items, classes, objects, kinds, owners, names, values, modules, keys, entries, gone): lists that go
   together are equally long. */
static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *l[13], *missing, *kept;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs)) return PyErr_Format(PyExc_TypeError, "no keywords");
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!O!O!O!O!O!O!O!O", &PyList_Type, &l[0], &PyList_Type, &l[1], &PyList_Type, &l[2], &PyList_Type,
                          &l[3], &PyList_Type, &l[4], &PyList_Type, &l[5], &PyList_Type, &l[6], &PyList_Type, &l[7], &PyList_Type, &l[8],
                          &PyList_Type, &l[9], &PyList_Type, &l[10], &PyList_Type, &l[11], &PyList_Type, &l[12], &missing))
        return NULL;
    static const int together[][2] = {{0, 1}, {2, 3}, {5, 6}, {7, 8}, {7, 9}, {10, 11}, {10, 12}};
    for (size_t i = 0; i < sizeof together / sizeof *together; i++)
        if (PyList_GET_SIZE(l[together[i][0]]) != PyList_GET_SIZE(l[together[i][1]]))
            return PyErr_Format(PyExc_ValueError, "lists %d and %d differ in length", together[i][0], together[i][1]);
    if (!all_of(l[0], is_dict) || !all_of(l[1], is_state) || !all_of(l[2], is_list_set_or_dict) || !all_of(l[3], is_list) || !all_of(l[4], is_class) || !all_of(l[6], is_class) ||
        !all_of(l[8], is_name) || !all_of(l[10], is_dict))
        return PyErr_Format(PyExc_TypeError, "a list holds something else than it is for");
    kept = PyTuple_New(13);
    if (kept == NULL) return NULL;
    for (int i = 0; i < 13; i++) {
        PyObject *copy = PyList_GetSlice(l[i], 0, PyList_GET_SIZE(l[i]));
        if (copy == NULL) { Py_DECREF(kept); return NULL; }
        PyTuple_SET_ITEM(kept, i, copy);
        l[i] = copy;
    }
    Watched *self = (Watched *)type->tp_alloc(type, 0);
    if (self == NULL) { Py_DECREF(kept); return NULL; }
    self->kept = kept;
    Py_INCREF(missing);
    Py_XSETREF(gone, missing);
    self->n_dicts = PyList_GET_SIZE(l[0]); self->n_lists = PyList_GET_SIZE(l[2]); self->n_classes = PyList_GET_SIZE(l[4]);
    self->n_objects = PyList_GET_SIZE(l[5]); self->n_attributes = PyList_GET_SIZE(l[7]); self->n_entries = PyList_GET_SIZE(l[10]);
    self->dicts = pointers(l[0]); self->lists = pointers(l[2]); self->items = pointers(l[3]);
    self->classes = (PyTypeObject **)pointers(l[4]); self->objects = pointers(l[5]); self->kinds = (PyTypeObject **)pointers(l[6]);
    self->owners = pointers(l[7]); self->names = pointers(l[8]); self->values = pointers(l[9]);
    self->modules = pointers(l[10]); self->keys = pointers(l[11]); self->entries = pointers(l[12]);
    self->fields = PyMem_New(PyObject **, self->n_attributes + 1);
    self->contents = PyMem_New(PyObject *, self->n_attributes + 1);
    self->tags = PyMem_New(unsigned int, self->n_classes + 1);
    if (!self->dicts || !self->lists || !self->items || !self->classes || !self->objects || !self->kinds || !self->owners || !self->names ||
        !self->values || !self->modules || !self->keys || !self->entries || !self->tags || !self->fields || !self->contents) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
#if IS_TOLD
    if (!watch_dicts(self, l[1])) { Py_DECREF(self); return NULL; }
#else
    self->versions = PyMem_New(uint64_t, self->n_dicts + 1);
    self->module_versions = PyMem_New(uint64_t, self->n_entries + 1);
    if (!self->versions || !self->module_versions) { Py_DECREF(self); return PyErr_NoMemory(); }
    for (Py_ssize_t i = 0; i < self->n_dicts; i++) {
        self->versions[i] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(l[1], i));
        if (PyErr_Occurred()) { Py_DECREF(self); return NULL; }
    }
    for (Py_ssize_t i = 0; i < self->n_entries; i++) self->module_versions[i] = 0; /* none has this: the entry is looked up */
#endif
    for (Py_ssize_t i = 0; i < self->n_attributes; i++) {
        PyObject *was = self->values[i], **field = field_of(self->owners[i], self->names[i]);
        int known = field != NULL && (*field == was || (*field == NULL && (was == Py_None || was == gone)));
        self->fields[i] = known ? field : NULL;
        self->contents[i] = known ? *field : NULL;
    }
    PyObject *any = PyUnicode_InternFromString("__init__");
    for (Py_ssize_t i = 0; any != NULL && i < self->n_classes; i++) {
        _PyType_Lookup(self->classes[i], any); /* gives the class a version, if it has none */
        self->tags[i] = self->classes[i]->tp_version_tag;
        if (self->tags[i] == 0 && !IS_TOLD) {
            Py_DECREF(any);
            Py_DECREF(self);
            return PyErr_Format(PyExc_ValueError, "a class without a version");
        }
    }
    Py_XDECREF(any);
    if (any == NULL) { Py_DECREF(self); return NULL; }
    return (PyObject *)self;
}

static void end(Watched *self)
{
    void *made[] = {self->dicts, self->lists, self->items, self->classes, self->objects, self->kinds, self->owners, self->names, self->values,
                    self->modules, self->keys, self->entries, self->tags, self->fields, self->contents};
    PyObject_GC_UnTrack(self);
#if IS_TOLD
    PyMem_Free(self->split);
    PyMem_Free(self->parts);
    for (Py_ssize_t i = 0; self->mros != NULL && i < self->n_classes; i++) Py_XDECREF(self->mros[i]);
    PyMem_Free(self->mros);
#else
    PyMem_Free(self->versions);
    PyMem_Free(self->module_versions);
#endif
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) PyMem_Free(made[i]);
    Py_CLEAR(self->kept);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int traverse(Watched *self, visitproc visit, void *arg)
{
    Py_VISIT(self->kept);
#if IS_TOLD
    for (Py_ssize_t i = 0; self->mros != NULL && i < self->n_classes; i++) Py_VISIT(self->mros[i]);
#endif
    return 0;
}

static PyMethodDef methods[] = {{"holds", (PyCFunction)holds, METH_NOARGS, "Whether everything is as it was, or None where that cannot be told."}, {0}};
static PyTypeObject watched = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fxpasses_watch.Watched",
    .tp_basicsize = sizeof(Watched),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = make,
    .tp_dealloc = (destructor)end,
    .tp_traverse = (traverseproc)traverse,
    .tp_methods = methods,
};
static PyMethodDef functions[] = {
    {"unchanged", (PyCFunction)(void (*)(void))fxpasses_unchanged, METH_FASTCALL, "Whether each question is still answered so."}, {0}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "fxpasses_watch", NULL, -1, functions};

PyMODINIT_FUNC PyInit_fxpasses_watch(void)
{
    PyTypeObject *types[] = {&watched, &fxpasses_tensors, &fxpasses_arguments};
    PyObject *made = PyModule_Create(&module);
    for (size_t i = 0; made != NULL && i < sizeof types / sizeof *types; i++)
        if (PyModule_AddType(made, types[i]) < 0) Py_CLEAR(made);
    return made;
}
