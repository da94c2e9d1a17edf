//! `for` loops and the variable `loop`.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use super::ast::For;
use super::calls::CallArgs;
use super::compare;
use super::error::{Error, Result};
use super::interpreter::{Flow, Interpreter, Scope};
use super::text::StrBuilder;
use super::value::Value;

/// One run of a loop. Items are taken one by one, and the condition of `for … if` is
/// asked when its item's turn comes, as Jinja2's generators do.
pub(crate) struct LoopState {
    declaration: Arc<For>,
    /// Where the loop stands.
    outer: Weak<Scope>,
    remaining: Rc<RefCell<VecDeque<Value>>>,
    /// Known at once for what has a length in Python, else counted when it is asked for.
    length: Cell<Option<usize>>,
    /// Items that passed the condition, taken ahead of their turn.
    ahead: RefCell<VecDeque<Value>>,
    index0: Cell<usize>,
    current: RefCell<Option<Value>>,
    previous: RefCell<Option<Value>>,
    changed: RefCell<Option<Vec<Value>>>,
    /// Whether an iteration ran to its end.
    completed: Cell<bool>,
    depth0: usize,
}

/// The names that `loop` has.
pub(super) const ATTRIBUTES: [&str; 11] = [
    "index",
    "index0",
    "revindex",
    "revindex0",
    "first",
    "last",
    "length",
    "depth",
    "depth0",
    "previtem",
    "nextitem",
];

impl Interpreter {
    pub(super) fn run_for(
        &mut self,
        declaration: &Arc<For>,
        scope: &Rc<Scope>,
        out: &mut StrBuilder,
    ) -> Result<Flow> {
        let iterable = self.evaluate(&declaration.iterable, scope)?;
        self.run_loop(declaration, iterable, scope, 0, out)
    }

    fn run_loop(
        &mut self,
        declaration: &Arc<For>,
        iterable: Value,
        scope: &Rc<Scope>,
        depth0: usize,
        out: &mut StrBuilder,
    ) -> Result<Flow> {
        let (remaining, has_length) = self
            .iterator(&iterable)
            .map_err(|error| error.at(declaration.line))?;
        let known = has_length && declaration.condition.is_none();
        let length = known.then(|| remaining.borrow().len());
        let state = Rc::new(LoopState {
            declaration: declaration.clone(),
            outer: Rc::downgrade(scope),
            remaining,
            length: Cell::new(length),
            ahead: RefCell::default(),
            index0: Cell::new(0),
            current: RefCell::default(),
            previous: RefCell::default(),
            changed: RefCell::default(),
            completed: Cell::new(false),
            depth0,
        });
        let run = self.run_iterations(&state, scope, out);
        // `loop.changed(loop)` would hold itself.
        state.changed.take();
        let ran = run?;
        if ran {
            return Ok(Flow::Next);
        }
        let inner = Scope::inside(scope);
        self.run(&declaration.otherwise, &inner, out)
    }

    /// Whether there was an iteration that ended.
    fn run_iterations(
        &mut self,
        state: &Rc<LoopState>,
        scope: &Rc<Scope>,
        out: &mut StrBuilder,
    ) -> Result<bool> {
        let declaration = &state.declaration;
        let mut index = 0;
        while let Some(item) = self.take_item(state)? {
            state.index0.set(index);
            let before = state.current.replace(Some(item.clone()));
            state.previous.replace(before);
            index += 1;
            let inner = Scope::inside(scope);
            inner.set(&"loop".into(), Value::Loop(state.clone()));
            self.assign(&declaration.target, item, &inner)?;
            // Jinja2 notes an iteration at its end: a loop left by `break` in its first
            // iteration, or one that only continues, runs its `else` too.
            match self.run(&declaration.body, &inner, out)? {
                Flow::Break => return Ok(state.completed.get()),
                Flow::Continue => {}
                Flow::Next => state.completed.set(true),
            }
        }
        Ok(state.completed.get())
    }

    fn take_item(&mut self, state: &LoopState) -> Result<Option<Value>> {
        if let Some(item) = state.ahead.borrow_mut().pop_front() {
            return Ok(Some(item));
        }
        self.next_passing(state)
    }

    fn next_passing(&mut self, state: &LoopState) -> Result<Option<Value>> {
        loop {
            self.spend(1)?;
            let Some(item) = state.remaining.borrow_mut().pop_front() else {
                return Ok(None);
            };
            let Some(condition) = &state.declaration.condition else {
                return Ok(Some(item));
            };
            let Some(outer) = state.outer.upgrade() else {
                return Ok(None);
            };
            let scope = Scope::inside(&outer);
            self.assign(&state.declaration.target, item.clone(), &scope)?;
            if self.evaluate(condition, &scope)?.is_true() {
                return Ok(Some(item));
            }
        }
    }

    fn peek(&mut self, state: &LoopState) -> Result<Option<Value>> {
        if state.ahead.borrow().is_empty()
            && let Some(item) = self.next_passing(state)?
        {
            state.ahead.borrow_mut().push_back(item);
        }
        Ok(state.ahead.borrow().front().cloned())
    }

    pub(super) fn loop_length(&mut self, state: &LoopState) -> Result<usize> {
        if let Some(length) = state.length.get() {
            return Ok(length);
        }
        while let Some(item) = self.next_passing(state)? {
            state.ahead.borrow_mut().push_back(item);
        }
        let length = state.index0.get() + 1 + state.ahead.borrow().len();
        state.length.set(Some(length));
        Ok(length)
    }

    pub(super) fn loop_attribute(&mut self, state: &LoopState, name: &str) -> Result<Value> {
        let index0 = state.index0.get();
        let count = |count: usize| Ok(Value::Int(count as i128));
        match name {
            "index" => count(index0 + 1),
            "index0" => count(index0),
            "revindex" => Ok(Value::Int(
                self.loop_length(state)? as i128 - index0 as i128,
            )),
            "revindex0" => Ok(Value::Int(
                self.loop_length(state)? as i128 - index0 as i128 - 1,
            )),
            "first" => Ok(Value::Bool(index0 == 0)),
            "last" => Ok(Value::Bool(self.peek(state)?.is_none())),
            "length" => count(self.loop_length(state)?),
            "depth" => count(state.depth0 + 1),
            "depth0" => count(state.depth0),
            "previtem" => {
                let item = state.previous.borrow().clone();
                Ok(item.unwrap_or_else(|| Value::undefined("there is no previous item")))
            }
            "nextitem" => {
                let item = self.peek(state)?;
                Ok(item.unwrap_or_else(|| Value::undefined("there is no next item")))
            }
            _ => Err(Error::unsupported(format!("`loop.{name}`"))),
        }
    }

    /// `loop.cycle(…)` and `loop.changed(…)`.
    pub(super) fn loop_method(
        &mut self,
        state: &LoopState,
        name: &str,
        args: CallArgs,
    ) -> Result<Value> {
        if !args.keywords.is_empty() {
            return Err(Error::failed(format!(
                "loop.{name}() takes no keyword arguments"
            )));
        }
        let values = args.positional;
        if name == "cycle" {
            return match values.len() {
                0 => Err(Error::failed("no items for cycling given")),
                count => Ok(values[state.index0.get() % count].clone()),
            };
        }
        for value in &values {
            self.spend(value.weight())?;
        }
        let same = state.changed.borrow().as_ref().is_some_and(|last| {
            last.len() == values.len()
                && last
                    .iter()
                    .zip(&values)
                    .all(|(last, value)| compare::equal(last, value))
        });
        if !same {
            state.changed.replace(Some(values));
        }
        Ok(Value::Bool(!same))
    }

    /// `loop(children)` in a recursive loop.
    pub(super) fn call_loop(&mut self, state: &LoopState, args: CallArgs) -> Result<Value> {
        if !state.declaration.recursive {
            return Err(Error::failed(
                "the loop must have the 'recursive' marker to be called recursively",
            ));
        }
        let [iterable] = args.bind("loop", ["iterable"], 1)?;
        let Some(outer) = state.outer.upgrade() else {
            return Err(Error::unsupported("calling a loop after it ended"));
        };
        let mut out = StrBuilder::default();
        let depth0 = state.depth0 + 1;
        let declaration = state.declaration.clone();
        let iterable = iterable.unwrap_or(Value::None);
        self.deeper(|interpreter| {
            interpreter.run_loop(&declaration, iterable, &outer, depth0, &mut out)
        })?;
        Ok(Value::Str(out.finish()))
    }
}
