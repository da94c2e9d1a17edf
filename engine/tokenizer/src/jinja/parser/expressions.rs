//! Jinja2's expressions.

use super::{Parsed, Parser};
use crate::jinja::ast::{Arguments, Binary, Comparison, Expr, ExprKind, FilterCall};
use crate::jinja::lexer::Token;

/// Puts two operands together.
type Make = fn(Box<Expr>, Box<Expr>) -> ExprKind;

impl Parser {
    pub(super) fn expression(&mut self) -> Parsed<Expr> {
        self.nested(Self::conditional)
    }

    pub(super) fn conditional(&mut self) -> Parsed<Expr> {
        let before = self.depth;
        let mut value = self.or()?;
        while self.is_name("if") {
            let line = self.line();
            self.next();
            self.deepen()?;
            let condition = self.or()?;
            let other = if self.skip_name("else") {
                Some(Box::new(self.nested(Self::conditional)?))
            } else {
                None
            };
            value = Expr {
                kind: ExprKind::Conditional(Box::new(condition), Box::new(value), other),
                line,
            };
        }
        self.depth = before;
        Ok(value)
    }

    /// Operators of one precedence, from the left.
    pub(super) fn chain(
        &mut self,
        operand: fn(&mut Self) -> Parsed<Expr>,
        operator: fn(&Self) -> Option<Make>,
    ) -> Parsed<Expr> {
        let before = self.depth;
        let mut left = operand(self)?;
        while let Some(make) = operator(self) {
            let line = self.line();
            self.next();
            self.deepen()?;
            let right = operand(self)?;
            left = Expr {
                kind: make(Box::new(left), Box::new(right)),
                line,
            };
        }
        self.depth = before;
        Ok(left)
    }

    pub(super) fn or(&mut self) -> Parsed<Expr> {
        self.chain(Self::and, |parser| {
            parser.is_name("or").then_some(ExprKind::Or as _)
        })
    }

    pub(super) fn and(&mut self) -> Parsed<Expr> {
        self.chain(Self::not, |parser| {
            parser.is_name("and").then_some(ExprKind::And as _)
        })
    }

    pub(super) fn not(&mut self) -> Parsed<Expr> {
        if self.is_name("not") {
            let line = self.line();
            self.next();
            let inner = self.nested(Self::not)?;
            return Ok(Expr {
                kind: ExprKind::Not(Box::new(inner)),
                line,
            });
        }
        self.compare()
    }

    pub(super) fn compare(&mut self) -> Parsed<Expr> {
        let line = self.line();
        let first = self.sum()?;
        let mut rest = Vec::new();
        loop {
            let comparison = match self.token() {
                Token::Operator("==") => Comparison::Equal,
                Token::Operator("!=") => Comparison::NotEqual,
                Token::Operator("<") => Comparison::Less,
                Token::Operator("<=") => Comparison::LessEqual,
                Token::Operator(">") => Comparison::Greater,
                Token::Operator(">=") => Comparison::GreaterEqual,
                Token::Name(name) if &**name == "in" => Comparison::In,
                Token::Name(name)
                    if &**name == "not"
                        && matches!(self.look(), Token::Name(name) if &**name == "in") =>
                {
                    self.next();
                    Comparison::NotIn
                }
                _ => break,
            };
            self.next();
            rest.push((comparison, self.sum()?));
        }
        if rest.is_empty() {
            return Ok(first);
        }
        Ok(Expr {
            kind: ExprKind::Compare(Box::new(first), rest),
            line,
        })
    }

    pub(super) fn sum(&mut self) -> Parsed<Expr> {
        self.chain(Self::concat, |parser| match parser.token() {
            Token::Operator("+") => Some(|l, r| ExprKind::Binary(Binary::Add, l, r)),
            Token::Operator("-") => Some(|l, r| ExprKind::Binary(Binary::Subtract, l, r)),
            _ => None,
        })
    }

    pub(super) fn concat(&mut self) -> Parsed<Expr> {
        let line = self.line();
        let mut parts = vec![self.product()?];
        while self.skip_operator("~") {
            parts.push(self.product()?);
        }
        if parts.len() == 1
            && let Some(only) = parts.pop()
        {
            return Ok(only);
        }
        Ok(Expr {
            kind: ExprKind::Concat(parts),
            line,
        })
    }

    pub(super) fn product(&mut self) -> Parsed<Expr> {
        self.chain(Self::power, |parser| match parser.token() {
            Token::Operator("*") => Some(|l, r| ExprKind::Binary(Binary::Multiply, l, r)),
            Token::Operator("/") => Some(|l, r| ExprKind::Binary(Binary::Divide, l, r)),
            Token::Operator("//") => Some(|l, r| ExprKind::Binary(Binary::FloorDivide, l, r)),
            Token::Operator("%") => Some(|l, r| ExprKind::Binary(Binary::Modulo, l, r)),
            _ => None,
        })
    }

    /// Jinja2 groups powers from the left, unlike Python. The Python code that it writes
    /// has the brackets, so the left operand's sign binds first.
    pub(super) fn power(&mut self) -> Parsed<Expr> {
        self.chain(
            |parser| parser.unary(true),
            |parser| {
                parser
                    .is_operator("**")
                    .then_some(|l, r| ExprKind::Binary(Binary::Power, l, r))
            },
        )
    }

    pub(super) fn unary(&mut self, with_filters: bool) -> Parsed<Expr> {
        let before = self.depth;
        let line = self.line();
        let mut node = if self.skip_operator("-") {
            let inner = self.nested(|parser| parser.unary(false))?;
            Expr {
                kind: ExprKind::Negative(Box::new(inner)),
                line,
            }
        } else if self.skip_operator("+") {
            let inner = self.nested(|parser| parser.unary(false))?;
            Expr {
                kind: ExprKind::Positive(Box::new(inner)),
                line,
            }
        } else {
            self.primary()?
        };
        node = self.postfix(node)?;
        if with_filters {
            node = self.filters(node)?;
        }
        self.depth = before;
        Ok(node)
    }

    pub(super) fn primary(&mut self) -> Parsed<Expr> {
        let line = self.line();
        let kind = match self.token().clone() {
            Token::Name(name) => {
                self.next();
                match &*name {
                    "true" | "True" => ExprKind::Bool(true),
                    "false" | "False" => ExprKind::Bool(false),
                    "none" | "None" => ExprKind::None,
                    _ => {
                        self.names.push(name.clone());
                        ExprKind::Name(name)
                    }
                }
            }
            Token::Str(first) => {
                self.next();
                let mut text = first.to_string();
                while let Token::Str(more) = self.token() {
                    text.push_str(more);
                    self.next();
                }
                ExprKind::Str(text.into())
            }
            Token::Int(value) => {
                self.next();
                ExprKind::Int(value)
            }
            Token::Float(value) => {
                self.next();
                ExprKind::Float(value)
            }
            Token::Operator("(") => {
                self.next();
                let inner = self.nested(|parser| parser.tuple(true, true, None))?;
                self.expect_operator(")")?;
                return Ok(inner);
            }
            Token::Operator("[") => {
                self.next();
                let mut items = Vec::new();
                while !self.is_operator("]") {
                    if !items.is_empty() {
                        self.expect_operator(",")?;
                    }
                    if self.is_operator("]") {
                        break;
                    }
                    items.push(self.expression()?);
                }
                self.expect_operator("]")?;
                ExprKind::List(items)
            }
            Token::Operator("{") => {
                self.next();
                let mut items = Vec::new();
                while !self.is_operator("}") {
                    if !items.is_empty() {
                        self.expect_operator(",")?;
                    }
                    if self.is_operator("}") {
                        break;
                    }
                    let key = self.expression()?;
                    self.expect_operator(":")?;
                    items.push((key, self.expression()?));
                }
                self.expect_operator("}")?;
                ExprKind::Dict(items)
            }
            _ => return self.fail(format!("unexpected {}", self.describe())),
        };
        Ok(Expr { kind, line })
    }

    /// Expressions with commas between them; one without is itself.
    pub(super) fn tuple(
        &mut self,
        with_condition: bool,
        in_brackets: bool,
        end_name: Option<&str>,
    ) -> Parsed<Expr> {
        let line = self.line();
        let mut items: Vec<Expr> = Vec::new();
        let mut is_tuple = false;
        loop {
            if !items.is_empty() {
                self.expect_operator(",")?;
            }
            let at_end = matches!(self.token(), Token::VariableEnd | Token::BlockEnd)
                || self.is_operator(")")
                || end_name.is_some_and(|name| self.is_name(name));
            if at_end {
                break;
            }
            items.push(if with_condition {
                self.expression()?
            } else {
                self.nested(Self::or)?
            });
            if !self.is_operator(",") {
                break;
            }
            is_tuple = true;
        }
        if !is_tuple {
            match items.pop() {
                Some(only) => return Ok(only),
                None if in_brackets => {}
                None => {
                    return self.fail(format!("expected an expression, got {}", self.describe()));
                }
            }
        }
        Ok(Expr {
            kind: ExprKind::Tuple(items),
            line,
        })
    }

    pub(super) fn postfix(&mut self, mut node: Expr) -> Parsed<Expr> {
        loop {
            let line = self.line();
            let kind = match self.token() {
                Token::Operator(".") => self.attribute(node)?,
                Token::Operator("[") => self.subscript(node)?,
                Token::Operator("(") => ExprKind::Call(Box::new(node), Box::new(self.arguments()?)),
                _ => return Ok(node),
            };
            self.deepen()?;
            node = Expr { kind, line };
        }
    }

    pub(super) fn filters(&mut self, mut node: Expr) -> Parsed<Expr> {
        loop {
            let line = self.line();
            let kind = match self.token() {
                Token::Operator("|") => {
                    self.next();
                    ExprKind::Filter(Box::new(node), Box::new(self.filter()?))
                }
                Token::Name(name) if &**name == "is" => {
                    self.next();
                    self.test(node)?
                }
                Token::Operator("(") => ExprKind::Call(Box::new(node), Box::new(self.arguments()?)),
                _ => return Ok(node),
            };
            self.deepen()?;
            node = Expr { kind, line };
        }
    }

    pub(super) fn attribute(&mut self, node: Expr) -> Parsed<ExprKind> {
        self.next();
        let line = self.line();
        match self.token().clone() {
            Token::Name(name) => {
                self.next();
                Ok(ExprKind::Attribute(Box::new(node), name))
            }
            Token::Int(index) => {
                self.next();
                let index = Expr {
                    kind: ExprKind::Int(index),
                    line,
                };
                Ok(ExprKind::Item(Box::new(node), Box::new(index)))
            }
            _ => self.fail("expected name or number"),
        }
    }

    pub(super) fn subscript(&mut self, node: Expr) -> Parsed<ExprKind> {
        self.next();
        let line = self.line();
        let mut items = Vec::new();
        while !self.is_operator("]") {
            if !items.is_empty() {
                self.expect_operator(",")?;
            }
            let start = if self.is_operator(":") {
                None
            } else {
                Some(self.expression()?)
            };
            if !self.skip_operator(":") {
                items.extend(start);
                continue;
            }
            let is_end = |parser: &Self| parser.is_operator("]") || parser.is_operator(",");
            let stop = if self.is_operator(":") || is_end(self) {
                None
            } else {
                Some(self.expression()?)
            };
            let step = if self.skip_operator(":") && !is_end(self) {
                Some(self.expression()?)
            } else {
                None
            };
            if !items.is_empty() || !self.skip_operator("]") {
                return self.fail("a slice among other subscripts is not supported");
            }
            return Ok(ExprKind::Slice(
                Box::new(node),
                Box::new([start, stop, step]),
            ));
        }
        self.expect_operator("]")?;
        let index = match items.pop() {
            Some(only) if items.is_empty() => only,
            last => {
                items.extend(last);
                Expr {
                    kind: ExprKind::Tuple(items),
                    line,
                }
            }
        };
        Ok(ExprKind::Item(Box::new(node), Box::new(index)))
    }

    pub(super) fn arguments(&mut self) -> Parsed<Arguments> {
        self.expect_operator("(")?;
        let mut arguments = Arguments::default();
        let mut first = true;
        while !self.is_operator(")") {
            if !first {
                self.expect_operator(",")?;
                if self.is_operator(")") {
                    break;
                }
            }
            first = false;
            let starred = arguments.star.is_some() || arguments.star_star.is_some();
            let is_keyword = matches!(self.token(), Token::Name(_))
                && matches!(self.look(), Token::Operator("="));
            let misplaced = if self.skip_operator("*") {
                arguments.star = Some(self.expression()?);
                starred
            } else if self.skip_operator("**") {
                let again = arguments.star_star.is_some();
                arguments.star_star = Some(self.expression()?);
                again
            } else if is_keyword {
                let name = self.expect_name()?;
                self.next();
                let again = arguments.keywords.iter().any(|(known, _)| *known == name);
                arguments.keywords.push((name, self.expression()?));
                again || arguments.star_star.is_some()
            } else {
                arguments.positional.push(self.expression()?);
                starred || !arguments.keywords.is_empty()
            };
            if misplaced {
                return self.fail("invalid syntax for function call expression");
            }
        }
        self.expect_operator(")")?;
        Ok(arguments)
    }

    pub(super) fn filter(&mut self) -> Parsed<FilterCall> {
        let line = self.line();
        let mut name = self.expect_name()?.to_string();
        while self.skip_operator(".") {
            name = format!("{name}.{}", self.expect_name()?);
        }
        let arguments = if self.is_operator("(") {
            self.arguments()?
        } else {
            Arguments::default()
        };
        Ok(FilterCall {
            name: name.into(),
            arguments,
            line,
        })
    }

    pub(super) fn test(&mut self, node: Expr) -> Parsed<ExprKind> {
        let negated = self.skip_name("not");
        let line = self.line();
        let mut name = self.expect_name()?.to_string();
        while self.skip_operator(".") {
            name = format!("{name}.{}", self.expect_name()?);
        }
        let takes_operand = match self.token() {
            Token::Name(name) => !matches!(&**name, "else" | "or" | "and"),
            Token::Str(_) | Token::Int(_) | Token::Float(_) => true,
            Token::Operator(operator) => matches!(*operator, "[" | "{"),
            _ => false,
        };
        let arguments = if self.is_operator("(") {
            self.arguments()?
        } else if takes_operand {
            if self.is_name("is") {
                return self.fail("tests cannot be chained with `is`");
            }
            let operand = self.nested(|parser| {
                let operand = parser.primary()?;
                parser.postfix(operand)
            })?;
            Arguments {
                positional: vec![operand],
                ..Arguments::default()
            }
        } else {
            Arguments::default()
        };
        let call = FilterCall {
            name: name.into(),
            arguments,
            line,
        };
        let test = ExprKind::Test(Box::new(node), Box::new(call));
        if !negated {
            return Ok(test);
        }
        Ok(ExprKind::Not(Box::new(Expr { kind: test, line })))
    }
}
