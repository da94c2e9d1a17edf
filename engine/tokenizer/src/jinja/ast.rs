//! A template as a tree.

use std::sync::Arc;

pub(super) type Body = Vec<Stmt>;

pub(super) enum Stmt {
    Text(Arc<str>),
    Output(Expr),
    For(Arc<For>),
    /// Conditions and their bodies, then the body of `else`.
    If(Vec<(Expr, Body)>, Body),
    Set(Target, Expr),
    SetBlock(Target, Vec<FilterCall>, Body),
    With(Vec<(Target, Expr)>, Body),
    FilterBlock(Vec<FilterCall>, Body),
    Macro(Arc<Macro>),
    /// A call that may use the body as `caller`.
    CallBlock(Arc<Macro>, Expr),
    /// `{% generation %}`: the body in a scope of its own.
    Generation(Body),
    Break,
    Continue,
}

pub(super) struct For {
    pub(super) target: Target,
    pub(super) iterable: Expr,
    pub(super) condition: Option<Expr>,
    pub(super) recursive: bool,
    pub(super) body: Body,
    pub(super) otherwise: Body,
    pub(super) line: u32,
}

pub(super) struct Macro {
    pub(super) name: Arc<str>,
    pub(super) parameters: Vec<Arc<str>>,
    /// Of the last parameters.
    pub(super) defaults: Vec<Expr>,
    pub(super) uses_caller: bool,
    pub(super) uses_kwargs: bool,
    pub(super) uses_varargs: bool,
    pub(super) body: Body,
    pub(super) line: u32,
}

pub(super) enum Target {
    Name(Arc<str>),
    Attribute(Arc<str>, Arc<str>, u32),
    Tuple(Vec<Target>, u32),
}

pub(super) struct FilterCall {
    pub(super) name: Arc<str>,
    pub(super) arguments: Arguments,
    pub(super) line: u32,
}

pub(super) struct Expr {
    pub(super) kind: ExprKind,
    pub(super) line: u32,
}

pub(super) enum ExprKind {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
    Name(Arc<str>),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Attribute(Box<Expr>, Arc<str>),
    Item(Box<Expr>, Box<Expr>),
    Slice(Box<Expr>, Box<[Option<Expr>; 3]>),
    Call(Box<Expr>, Box<Arguments>),
    Filter(Box<Expr>, Box<FilterCall>),
    Test(Box<Expr>, Box<FilterCall>),
    Negative(Box<Expr>),
    Positive(Box<Expr>),
    Not(Box<Expr>),
    Binary(Binary, Box<Expr>, Box<Expr>),
    Concat(Vec<Expr>),
    Compare(Box<Expr>, Vec<(Comparison, Expr)>),
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    /// Condition, value, other value.
    Conditional(Box<Expr>, Box<Expr>, Option<Box<Expr>>),
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Binary {
    Add,
    Subtract,
    Multiply,
    Divide,
    FloorDivide,
    Modulo,
    Power,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    In,
    NotIn,
}

#[derive(Default)]
pub(super) struct Arguments {
    pub(super) positional: Vec<Expr>,
    pub(super) keywords: Vec<(Arc<str>, Expr)>,
    pub(super) star: Option<Expr>,
    pub(super) star_star: Option<Expr>,
}
